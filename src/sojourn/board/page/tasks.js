// The drawer of tasks: commands that the board has started, with their output.
import { get, poll, post } from "./api.js";
import { copyButton, h, icon, iconButton } from "./dom.js";
import * as format from "./format.js";
import { t } from "./i18n.js";

const $ = (id) => document.getElementById(id);
const MOST_TEXT = 200_000;
const state = { tasks: [], open: null, text: "", next: 0, error: "" };
let poller, following;

export function setUpTasks() {
  $("tasks-open").addEventListener("click", () => ($("tasks").hidden ? openTasks() : closeTasks()));
  $("tasks").addEventListener("keydown", (event) => event.key === "Escape" && closeTasks());
  poller = poll(load, 3, 10);
}

async function load(signal) {
  const { tasks } = await get("/api/tasks", signal);
  const changed = JSON.stringify(tasks) !== JSON.stringify(state.tasks);
  state.tasks = tasks;
  if (changed) drawTasks();
}

function openTasks() {
  $("tasks").hidden = false;
  $("tasks-open").setAttribute("aria-expanded", "true");
  drawTasks();
  $("tasks").querySelector("button")?.focus();
  if (state.open) follow();
}

function closeTasks() {
  following?.stop();
  following = null;
  $("tasks").hidden = true;
  $("tasks-open").setAttribute("aria-expanded", "false");
  $("tasks-open").focus();
}

export function openTask(id) {
  choose(id);
  if ($("tasks").hidden) openTasks();
  poller.now();
}

function choose(id) {
  following?.stop();
  following = null;
  Object.assign(state, { open: id, text: "", next: 0, error: "" });
  drawTasks();
  if (id && !$("tasks").hidden) follow();
}

// What has come of the output is in the language before.
export function changeTaskLanguage() {
  choose(state.open);
}

function follow() {
  following?.stop();
  const id = state.open;
  following = poll(async (signal) => {
    const found = await get(`/api/tasks/${encodeURIComponent(id)}?start=${state.next}`, signal);
    if (id !== state.open) return;
    if (found.text) state.text = (state.text + found.text).slice(-MOST_TEXT);
    state.next = found.next;
    const at = state.tasks.findIndex((task) => task.id === id);
    if (at < 0 || state.tasks[at].state !== found.state) poller.now();
    drawOutput(found);
    if (found.state !== "running" && !found.text) following?.stop();
  }, 1, 3);
}

export function drawTasks() {
  const running = state.tasks.filter((task) => task.state === "running").length;
  $("tasks-count").hidden = !running;
  $("tasks-count").textContent = String(running);
  if ($("tasks").hidden) return;
  const focused = document.activeElement?.dataset?.task;
  const head = h("div", { class: "drawer-head" }, h("h2", {}, t("nav_tasks")), iconButton("close", "close", closeTasks));
  const list = state.tasks.length ? state.tasks.map(drawTask) : [h("p", { class: "empty" }, t("no_tasks"))];
  $("tasks").replaceChildren(head, h("div", { class: "task-list" }, ...list));
  if (focused) $("tasks").querySelector(`[data-task="${CSS.escape(focused)}"]`)?.focus();
  drawOutput();
}

function drawTask(task) {
  const open = task.id === state.open;
  const head = h("button", { type: "button", class: "task-head", "data-task": task.id, "aria-expanded": String(open), onclick: () => choose(open ? null : task.id) },
    h("span", { class: `dot ${task.state}` }), h("code", {}, task.line), h("small", {}, `${t(`task_${task.state}`)} · ${format.moment(task.started)}`));
  if (!open) return h("div", { class: "task" }, head);
  const tools = h("div", { class: "task-tools" }, copyButton(() => task.line),
    task.url && h("a", { class: "button primary", href: task.url, target: "_blank", rel: "noopener" }, icon("chat"), t("open_chat")),
    task.run && h("a", { class: "button", href: `#/run/${encodeURIComponent(task.run)}` }, t("show_run")),
    task.state === "running" && h("button", { type: "button", onclick: () => stop(task) }, t("stop")));
  return h("div", { class: "task open" }, head, tools, h("p", { class: "error", role: "alert", hidden: true }), h("pre", { class: "output", tabIndex: 0, "aria-label": t("output") }));
}

function drawOutput(task) {
  const area = $("tasks").querySelector(".output");
  if (!area) return;
  const atEnd = area.scrollHeight - area.scrollTop - area.clientHeight < 40;
  area.textContent = plain(state.text) || (task && task.state !== "running" ? t("no_output") : t("waiting_output"));
  if (atEnd) area.scrollTop = area.scrollHeight;
}

async function stop(task) {
  try {
    await post(`/api/tasks/${encodeURIComponent(task.id)}/stop`, {});
    poller.now();
  } catch (error) {
    Object.assign($("tasks").querySelector(".error"), { hidden: false, textContent: error.message || t("board_gone_short") });
  }
}

// What a terminal would show: without colours, and of a line that is written again and again the last.
export function plain(text) {
  return text.replace(/\x1b\[[0-9;?]*[A-Za-z]/g, "").replace(/\r\n/g, "\n").split("\n").map((line) => line.split("\r").findLast((part) => part) ?? "").join("\n");
}
