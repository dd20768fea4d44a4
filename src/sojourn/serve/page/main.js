// The page: what is shown now, and what its buttons and keys do.
import * as api from "./api.js";
import { addNode, asMessage, messagesTo, newConversation, newId, partnerOf, ROOT, shownPath, titleOf } from "./conversation.js";
import { announce, download, h, icon, iconButton } from "./dom.js";
import { fileName, fromJson, toJson, toMarkdown } from "./files.js";
import { t, translate } from "./i18n.js";
import { openSettings, parseTools, setUpSettings } from "./settings.js";
import * as storage from "./storage.js";
import { describe, drawMessages, updateMessage } from "./view.js";

const $ = (id) => document.getElementById(id);
const state = { conversation: null, models: [], running: new Map(), editing: null, draft: "", feedback: false };
let conversations = storage.loadAll();
const forgotten = new Set(); // an answer that was under way does not bring its conversation back

// -- Drawing --

function draw() {
  drawMessages($("messages"), state, actions);
  const { conversation } = state;
  $("messages").classList.toggle("wide", Boolean(document.querySelector(".pair")));
  document.title = titleOf(conversation) || "Sojourn";
  $("compare").setAttribute("aria-pressed", String(conversation.compare));
  $("other").hidden = !conversation.compare;
  drawModels();
  drawChats();
  drawRunning();
}

function drawRunning() {
  $("stop").hidden = !state.running.size;
  $("send").hidden = Boolean(state.running.size);
}

function drawChats() {
  const entry = (one) => h("div", { class: one.id === state.conversation.id ? "chat current" : "chat" },
    h("button", { type: "button", class: "open", onclick: () => show(one), "aria-current": String(one.id === state.conversation.id) }, titleOf(one) || t("untitled")),
    iconButton("trash", "delete", () => forget(one)));
  $("chats").replaceChildren(...conversations.map(entry));
}

function drawModels() {
  const { conversation, models } = state;
  for (const [at, select] of [$("model"), $("other")].entries()) {
    if (!models.includes(conversation.models[at])) conversation.models[at] = models[at] ?? models[0] ?? "";
    select.replaceChildren(...models.map((name) => h("option", { value: name }, name)));
    select.value = conversation.models[at];
    select.disabled = !models.length;
  }
}

function notice(text, retry) {
  $("notice").hidden = !text;
  $("notice").replaceChildren(text, ...(retry ? [" ", h("button", { type: "button", onclick: retry }, t("retry"))] : []));
}

const isAtBottom = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < 80;
const toBottom = () => ($("scroll").scrollTop = $("scroll").scrollHeight);

// -- Conversations --

function keep(conversation = state.conversation) {
  if (forgotten.has(conversation.id)) return;
  if (!storage.save(conversation)) notice(t("storage_full"));
  if (!conversations.includes(conversation) && Object.keys(conversation.nodes).length) conversations.unshift(conversation);
}

function show(conversation) {
  stop();
  state.conversation = conversation;
  state.editing = null;
  for (const node of Object.values(conversation.nodes)) {
    if (node.role === "assistant" && !node.finish && !node.error) node.finish = "stopped"; // the page was closed meanwhile
  }
  notice("");
  draw();
  closeSide();
  toBottom();
  $("input").focus({ preventScroll: true });
}

function forget(conversation) {
  if (!confirm(t("delete_ask", { title: titleOf(conversation) || t("untitled") }))) return;
  forgotten.add(conversation.id);
  storage.remove(conversation);
  conversations = conversations.filter((one) => one !== conversation);
  if (conversation === state.conversation) show(newConversation(conversation));
  else drawChats();
}

// -- Answers --

function answer(parent) {
  const { conversation } = state;
  const names = conversation.compare ? conversation.models : conversation.models.slice(0, 1);
  const pair = names.length > 1 ? newId() : undefined;
  const nodes = names.map((model) => addNode(conversation, parent, { role: "assistant", model, ...(pair && { pair }) }));
  conversation.picked[parent] = nodes[0].id;
  keep();
  for (const node of nodes) generate(conversation, node);
}

async function generate(conversation, node) {
  const stopper = new AbortController();
  state.running.set(node.id, stopper);
  Object.assign(node, { content: "", reasoning: "", tool_calls: undefined, error: undefined, finish: undefined, usage: undefined });
  draw();
  toBottom();
  announce(t("answering"));
  try {
    await stream(conversation, node, stopper.signal);
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else node.error = asError(error);
  }
  state.running.delete(node.id);
  conversation.updated = Date.now();
  keep(conversation);
  draw();
  announce(node.error ? describe(node.error) : t("done", { text: node.content.slice(0, 500) }));
  if (node.error?.kind === "key" && (await askKey())) generate(conversation, node);
}

function asError(error) {
  if (!(error instanceof api.Failure)) return { kind: "failed", message: String(error.message ?? error) };
  const until = error.seconds ? Date.now() + error.seconds * 1000 : undefined;
  return { kind: error.kind, message: error.message, until };
}

async function stream(conversation, node, signal) {
  const stops = conversation.stops.split("\n").filter(Boolean);
  const tools = parseTools(conversation.tools);
  const body = {
    model: node.model, messages: messagesTo(conversation, conversation.nodes[node.parent]), ...conversation.params,
    ...(stops.length && { stop: stops }), ...(tools.length && { tools }),
  };
  let first = 0, drawing = 0;
  const redraw = () => {
    drawing = 0;
    const article = document.querySelector(`[data-id="${node.id}"]`), follow = isAtBottom();
    if (article) updateMessage(article, node, state.running.has(node.id), actions);
    if (follow) toBottom();
  };
  node.usage = await api.streamChat(body, signal, (delta, finish) => {
    first ||= performance.now();
    node.content += delta.content ?? "";
    node.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) addCall(node, call);
    node.finish = finish ?? node.finish;
    node.seconds = (performance.now() - first) / 1000;
    drawing ||= requestAnimationFrame(redraw);
  });
}

function addCall(node, piece) {
  node.tool_calls ??= [];
  const call = (node.tool_calls[piece.index ?? 0] ??= { id: piece.id ?? newId(), type: "function", function: { name: "", arguments: "" } });
  call.function.name += piece.function?.name ?? "";
  call.function.arguments += piece.function?.arguments ?? "";
}

function stop() {
  for (const stopper of state.running.values()) stopper.abort();
}

// -- Feedback --

async function report(body) {
  if (!state.feedback) return;
  const { conversation } = state, tools = parseTools(conversation.tools);
  try {
    await api.sendFeedback({ ...body, ...(tools.length && { tools }) });
    announce(t("saved_feedback"));
    notice("");
  } catch (error) {
    notice(describe(asError(error)));
  }
}

const promptOf = (node) => messagesTo(state.conversation, state.conversation.nodes[node.parent]);

const actions = {
  retry: (node) => generate(state.conversation, node),
  regenerate: (node) => answer(node.parent),
  edit(node) {
    state.editing = node.id;
    state.draft = node.content;
    draw();
  },
  cancelEdit() {
    state.editing = null;
    draw();
    $("input").focus();
  },
  pick(node) {
    state.conversation.picked[node.parent] = node.id;
    keep();
    draw();
  },
  saveEdit(node, text) {
    state.editing = null;
    const { conversation } = state;
    if (node.role === "user") {
      answer(addNode(conversation, node.parent, { role: "user", content: text }).id);
    } else if (text !== node.content) {
      const original = conversation.nodes[node.edited] ?? node;
      const edited = addNode(conversation, node.parent, { role: "assistant", content: text, model: node.model, finish: "stop", edited: original.id });
      keep();
      if (original.content || original.tool_calls?.length) {
        report({ id: `edit-${original.id}`, kind: "correction", model: node.model, prompt: promptOf(node), chosen: asMessage(edited), rejected: asMessage(original) });
      }
    }
    draw();
    $("input").focus();
  },
  rate(node, kind) {
    node.rating = node.rating === kind ? undefined : kind;
    keep();
    draw();
    const side = kind === "like" ? "chosen" : "rejected";
    report(node.rating ? { id: node.id, kind, model: node.model, prompt: promptOf(node), [side]: asMessage(node) } : { id: node.id, kind: "none" });
  },
  prefer(node) {
    const { conversation } = state, other = partnerOf(conversation, node);
    node.preferred = !node.preferred;
    other.preferred = false;
    conversation.picked[node.parent] = node.id;
    keep();
    draw();
    const id = `pair-${node.pair}`, differ = node.content !== other.content && other.content && node.content;
    if (!node.preferred) report({ id, kind: "none" });
    else if (differ) report({ id, kind: "preference", model: node.model, prompt: promptOf(node), chosen: asMessage(node), rejected: asMessage(other) });
  },
  sendResults(node, results) {
    let parent = node.id;
    node.tool_calls.forEach((call, at) => {
      parent = addNode(state.conversation, parent, { role: "tool", content: results[at], tool_call_id: call.id }).id;
    });
    answer(parent);
  },
};

// -- The composer and the keyboard --

function send() {
  const text = $("input").value;
  if (!text.trim() || state.running.size) return;
  if (!state.models.length) return notice(t("no_model"), connect);
  $("input").value = "";
  grow();
  notice("");
  const last = shownPath(state.conversation).at(-1);
  answer(addNode(state.conversation, last?.id ?? ROOT, { role: "user", content: text }).id);
  toBottom();
}

function grow() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight}px`;
}

function editLast() {
  const last = shownPath(state.conversation).findLast((node) => node.role === "user");
  if (last && !state.running.size) actions.edit(last);
}

function closeSide() {
  document.body.classList.remove("side-open");
  $("menu").setAttribute("aria-expanded", "false");
}

function onKey(event) {
  if (event.isComposing || event.keyCode === 229 || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (state.editing) actions.cancelEdit();
    else if (document.body.classList.contains("side-open")) closeSide();
    else stop();
  } else if (event.target === $("input") && event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.target === $("input") && event.key === "ArrowUp" && !$("input").value) {
    event.preventDefault();
    editLast();
  }
}

// -- The server --

let asking = null;

// Once, however many answers wait for it.
function askKey() {
  return (asking ??= openKeyDialog().finally(() => (asking = null)));
}

function openKeyDialog() {
  const dialog = $("key");
  $("key-error").hidden = !api.hasKey();
  $("key-input").value = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    const key = $("key-input").value.trim();
    if (key) api.setKey(key);
    resolve(Boolean(key));
  }, { once: true }));
}

async function connect() {
  try {
    state.models = (await api.listModels()).map((model) => model.id);
    state.feedback = await api.feedbackEnabled();
    notice("");
  } catch (error) {
    if (error.kind === "key" && (await askKey())) return connect();
    if (error.kind === "loading") {
      notice(t("loading"));
      setTimeout(connect, error.seconds * 1000);
    } else notice(describe(asError(error)), connect);
  }
  draw();
}

async function importFile() {
  const file = $("file").files[0];
  if (!file) return;
  $("file").value = "";
  try {
    const made = fromJson(await file.text());
    made.models = [...state.conversation.models];
    show(made);
    keep();
    draw();
  } catch (error) {
    notice(t("bad_file", { name: file.name, reason: error.message }));
  }
}

function setUp() {
  for (const element of document.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));
  translate();
  setUpSettings(() => state.conversation, () => {
    keep();
    translate();
    draw();
  });
  const on = (id, event, call) => $(id).addEventListener(event, call);
  on("composer", "submit", (event) => (event.preventDefault(), send()));
  on("input", "input", grow);
  on("stop", "click", stop);
  on("new", "click", () => show(newConversation(state.conversation)));
  on("settings-open", "click", openSettings);
  on("menu", "click", () => $("menu").setAttribute("aria-expanded", String(document.body.classList.toggle("side-open"))));
  on("side-close", "click", closeSide);
  on("compare", "click", () => ((state.conversation.compare = !state.conversation.compare), keep(), draw()));
  on("import", "click", () => $("file").click());
  on("file", "change", importFile);
  on("export-json", "click", () => download(`${fileName(state.conversation)}.json`, "application/json", toJson(state.conversation)));
  on("export-md", "click", () => download(`${fileName(state.conversation)}.md`, "text/markdown", toMarkdown(state.conversation)));
  for (const [at, id] of ["model", "other"].entries()) on(id, "change", () => ((state.conversation.models[at] = $(id).value), keep()));
  document.addEventListener("keydown", onKey);
  document.querySelector("main").addEventListener("click", (event) => event.target.closest("#menu") || closeSide());
  window.addEventListener("pagehide", () => state.running.size && keep());
  window.addEventListener("storage", (event) => {
    if (!storage.isStored(event.key)) return;
    conversations = storage.loadAll().map((one) => (one.id === state.conversation.id ? state.conversation : one));
    drawChats();
  });
  show(conversations[0] ?? newConversation());
  connect();
}

setUp();
