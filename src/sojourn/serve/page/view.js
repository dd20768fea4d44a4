// Draws the branch that is shown. It decides nothing: buttons call `actions`.
import { partnerOf, shownPath, versionsOf } from "./conversation.js";
import { copyButton, h, icon, iconButton } from "./dom.js";
import { t } from "./i18n.js";
import { showMarkdown } from "./markdown.js";

// state: { conversation, running, editing, draft, feedback }
export function drawMessages(root, state, actions) {
  const path = shownPath(state.conversation);
  const parts = path.map((node) => drawTurn(node, state, actions));
  const last = path.at(-1);
  if (last?.tool_calls?.length && !state.running.has(last.id)) parts.push(drawToolForm(last, actions));
  root.replaceChildren(...(parts.length ? parts : [h("p", { class: "welcome" }, t("welcome"))]));
}

function drawTurn(node, state, actions) {
  const partner = partnerOf(state.conversation, node);
  if (!partner) return drawMessage(node, state, actions);
  const pair = Object.values(state.conversation.nodes).filter((one) => one === node || one === partner);
  const drawn = pair.map((one) => drawMessage(one, state, actions, one === node));
  return h("div", { class: "pair" }, ...drawn);
}

function drawMessage(node, state, actions, picked = true) {
  const running = state.running.has(node.id);
  const article = h("article", { class: `message ${node.role}${node.pair && picked ? " picked" : ""}`, "data-id": node.id });
  if (running) article.setAttribute("aria-busy", "true");
  if (node.role !== "user") article.append(h("h3", {}, node.role === "tool" ? t("tool") : node.model || t("model")));
  if (state.editing === node.id) {
    article.append(drawEditor(node, state, actions));
    return article;
  }
  article.append(h("div", { class: "body" }));
  article.append(h("div", { class: "note" }), drawActions(node, state, actions, running, picked));
  updateMessage(article, node, running, actions);
  return article;
}

// The content only: called for every piece of a stream.
export function updateMessage(article, node, running, actions) {
  const body = article.querySelector(".body");
  if (!body) return; // it is being edited
  if (node.role === "assistant") drawAnswer(body, node, running);
  else body.textContent = node.content;
  const note = article.querySelector(".note");
  note.replaceChildren(...(running ? [] : notes(node, actions)));
}

function drawAnswer(body, node, running) {
  const { thoughts, text, thinking } = splitThoughts(node);
  let [details, answer, calls] = body.children;
  if (!answer) {
    details = h("details", { class: "thoughts" }, h("summary", {}, t("thinking")), h("div"));
    body.append(details, (answer = h("div", { class: "markdown" })), (calls = h("div", { class: "calls" })));
  }
  details.hidden = !thoughts;
  details.open = details.open || (thinking && running);
  details.lastChild.textContent = thoughts;
  showMarkdown(answer, text);
  answer.classList.toggle("waiting", running);
  if (calls.children.length !== (node.tool_calls?.length ?? 0)) calls.replaceChildren();
  if (!calls.children.length) calls.append(...(node.tool_calls ?? []).map(drawCall));
}

function splitThoughts(node) {
  const found = /^\s*<think>([^]*?)(<\/think>|$)/.exec(node.content);
  const text = found ? node.content.slice(found[0].length) : node.content;
  const thoughts = (node.reasoning ?? "") + (found ? found[1] : "");
  return { thoughts: thoughts.trim(), text, thinking: !text.trim() };
}

function drawCall(call) {
  let text = call.function.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {} // what the model wrote is no JSON: shown as it is
  const head = h("div", { class: "code-head" }, h("span", {}, `${t("calls")} ${call.function.name}`), copyButton(() => text));
  return h("div", { class: "code call" }, head, h("pre", { tabIndex: 0 }, h("code", {}, text)));
}

function notes(node, actions) {
  if (node.error) return [drawError(node, actions)];
  const parts = [];
  if (node.usage) parts.push(t("tokens", { n: node.usage.completion_tokens }));
  if (node.usage && node.seconds > 0.05) parts.push(t("speed", { n: Math.round(node.usage.completion_tokens / node.seconds) }));
  if (node.finish === "length") parts.push(t("at_length"));
  if (node.finish === "stopped") parts.push(t("stopped"));
  if (node.edited) parts.push(t("edited"));
  return parts.length ? [h("span", {}, parts.join(" · "))] : [];
}

export function describe(error) {
  return t(error.kind, { reason: (error.message ?? "").replace(/[.。]$/, "") });
}

function drawError(node, actions) {
  const button = h("button", { type: "button", onclick: () => actions.retry(node) }, t("retry"));
  const left = () => Math.ceil(((node.error.until ?? 0) - Date.now()) / 1000);
  const tick = () => {
    const seconds = left();
    button.disabled = seconds > 0;
    button.textContent = seconds > 0 ? t("retry_in", { n: seconds }) : t("retry");
    if (seconds > 0) setTimeout(tick, 250);
  };
  tick();
  return h("p", { class: "error", role: "alert" }, describe(node.error), " ", button);
}

function drawActions(node, state, actions, running, picked) {
  const bar = h("div", { class: "actions" });
  const { versions, at } = versionsOf(state.conversation, node);
  if (versions.length > 1 && picked) bar.append(drawSwitch(versions, at, actions));
  if (running) return bar;
  if (node.content) bar.append(copyButton(() => node.content));
  if (node.role !== "tool") bar.append(iconButton("edit", "edit", () => actions.edit(node)));
  if (node.role !== "assistant") return bar;
  bar.append(iconButton("again", "regenerate", () => actions.regenerate(node)));
  if (state.feedback && !node.error && !node.edited && !node.pair) {
    for (const [name, key] of [["up", "like"], ["down", "dislike"]]) {
      const pressed = String(node.rating === key);
      bar.append(iconButton(name, key, () => actions.rate(node, key), { "aria-pressed": pressed }));
    }
  }
  if (node.pair && !node.error) {
    const pressed = String(Boolean(node.preferred));
    const label = node.preferred ? t("preferred") : t("prefer");
    bar.append(h("button", { type: "button", class: "prefer", "aria-pressed": pressed, onclick: () => actions.prefer(node) }, icon("check"), label));
  }
  return bar;
}

function drawSwitch(versions, at, actions) {
  const of = versions.length;
  const to = (place, name, key) => iconButton(name, key, () => actions.pick(versions[place]), { disabled: !versions[place] });
  const shown = h("span", { "aria-label": t("version", { at: at + 1, of }) }, `${at + 1}/${of}`);
  return h("span", { class: "switch" }, to(at - 1, "left", "previous"), shown, to(at + 1, "right", "next"));
}

function drawEditor(node, state, actions) {
  const area = h("textarea", { value: state.draft, "aria-label": t("edit"), rows: Math.min(14, state.draft.split("\n").length + 1) });
  area.addEventListener("input", () => (state.draft = area.value)); // what is drawn anew keeps it
  const save = () => area.value.trim() && actions.saveEdit(node, area.value);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing && event.keyCode !== 229 && (event.ctrlKey || event.metaKey || (node.role === "user" && !event.shiftKey))) {
      event.preventDefault();
      save();
    }
  });
  const buttons = h("div", { class: "buttons" },
    h("button", { type: "button", onclick: actions.cancelEdit }, t("cancel")),
    h("button", { type: "button", class: "primary", onclick: save }, t(node.role === "user" ? "save_send" : "save")));
  requestAnimationFrame(() => area.focus());
  return h("div", { class: "editor" }, area, buttons);
}

function drawToolForm(node, actions) {
  const areas = node.tool_calls.map((call) => h("textarea", { rows: 2, "aria-label": t("tool_result", { name: call.function.name }), placeholder: t("tool_result", { name: call.function.name }) }));
  const send = (event) => {
    event.preventDefault();
    actions.sendResults(node, areas.map((area) => area.value));
  };
  return h("form", { class: "editor tool-form", onsubmit: send }, ...areas,
    h("div", { class: "buttons" }, h("button", { class: "primary" }, t("send_results"))));
}
