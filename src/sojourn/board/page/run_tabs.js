// The tabs of a run. Each answers { element, key }: what has the same key is not drawn again.
import { post, runPath } from "./api.js";
import { eventClass } from "./chart.js";
import { askAction } from "./dialog.js";
import { copyButton, h, icon } from "./dom.js";
import { eventFacts, eventName } from "./events.js";
import * as format from "./format.js";
import { t } from "./i18n.js";
import { live } from "./live.js";
import { plain } from "./tasks.js";

const empty = (text) => h("p", { class: "empty" }, text);
const FORMATS = ["hf", "gguf", "gguf-adapter", "onnx", "mlx", "vllm"];
const LOG_BYTES = 40_000;

// -- Samples over time --

export async function drawSamples({ get }) {
  const { samples } = await get("/samples");
  if (!samples.length) return { element: empty(t("no_samples")), key: "none" };
  const prompts = [...new Set(samples.map((one) => one.prompt))];
  const parts = prompts.map((prompt) => {
    const all = samples.filter((one) => one.prompt === prompt);
    return h("article", { class: "sample" }, h("h3", {}, prompt), ...all.reverse().map((one, i) => h("details", { open: i < 3 }, h("summary", {}, t("at_step", { step: format.count(one.step) })), h("p", { class: "written" }, one.text))));
  });
  return { element: h("div", { class: "samples" }, ...parts), key: JSON.stringify(samples.map(({ step, text }) => [step, text.length])) };
}

// -- Checkpoints --

const nameOf = (one) => (one.step === null || one.step === undefined ? t(`checkpoint_${one.name ?? "final"}`) : t("at_step", { step: format.count(one.step) }));
const checkpointOf = (one) => (one.step === null || one.step === undefined ? (one.name ?? "final") : one.step);

export async function drawCheckpoints({ id, run, get }) {
  const { checkpoints = [] } = await get("");
  if (!checkpoints.length) return { element: empty(t("no_checkpoints")), key: "none" };
  const rows = checkpoints.map((one) => drawCheckpoint(id, run, one, checkpoints));
  const heads = ["checkpoint", "size", "checked", "actions"].map((name) => h("th", { scope: "col", class: name === "size" ? "number" : "" }, t(name)));
  const element = h("div", { class: "scroll" }, h("table", { class: "checkpoints" }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows)));
  return { element, key: JSON.stringify(checkpoints) };
}

function drawCheckpoint(id, run, one, all) {
  const result = h("td", {}, one.state === "whole" ? t("whole") : h("span", { class: "faint" }, t("unchecked")));
  const chosen = checkpointOf(one), isStep = typeof chosen === "number";
  const button = (name, key, act) => h("button", { type: "button", class: "quiet", onclick: act }, icon(name), t(key));
  const actions = [
    isStep && button("check", "verify", async (event) => {
      event.currentTarget.disabled = true;
      result.textContent = t("checking");
      try {
        const found = await post(runPath(id, "/verify"), { checkpoint: chosen });
        result.replaceChildren(found.whole ? t("whole") : h("span", { class: "error" }, found.damage));
      } catch (error) {
        result.replaceChildren(h("span", { class: "error" }, error.message));
      }
    }),
    button("save", "export", () => askExport(id, run, one)),
    button("chat", "chat", () => askChat(id, run, one, all)),
  ];
  const marks = [one.best && h("span", { class: "tag" }, t("best"))];
  return h("tr", {}, h("td", {}, nameOf(one), " ", ...marks.filter(Boolean), h("small", { class: "mono path" }, one.path)), h("td", { class: "number" }, format.bytes(one.bytes)), result, h("td", {}, h("div", { class: "group" }, ...actions.filter(Boolean))));
}

function askExport(id, run, one) {
  askAction({
    title: t("ask_export", { name: `${run?.name ?? id} · ${nameOf(one)}` }), text: t("ask_export_text"), button: t("export"), path: runPath(id, "/export"),
    fields: [{ name: "to", label: t("format"), options: FORMATS.map((value) => ({ value, text: t(`format_${value.replace("-", "_")}`) })) }, { name: "quantize", label: t("quantize"), placeholder: "q4_k_m, int8, …" }],
    body: ({ to, quantize }) => ({ checkpoint: checkpointOf(one), to, ...(quantize && { quantize }) }),
  });
}

function askChat(id, run, one, all) {
  const others = [{ value: "", text: t("alone") }, ...all.filter((other) => other !== one).map((other) => ({ value: `${run.path}@${checkpointOf(other)}`, text: nameOf(other) })),
    ...live.runs.filter((other) => other.id !== id && !other.host).map((other) => ({ value: other.path, text: other.name }))];
  askAction({
    title: t("ask_chat", { name: `${run?.name ?? id} · ${nameOf(one)}` }), text: t("ask_chat_text"), button: t("chat"), path: runPath(id, "/chat"),
    fields: [{ name: "beside", label: t("side_by_side"), options: others }],
    body: ({ beside }) => ({ checkpoint: checkpointOf(one), ...(beside && { beside }) }),
  });
}

// -- Settings, and what auto became --

export async function drawConfig({ get }) {
  const { config = {}, auto = {}, command = "", data } = await get("");
  const parts = [];
  if (command) parts.push(h("div", { class: "command" }, h("code", {}, command), copyButton(() => command)));
  if (data) parts.push(h("p", {}, `${t("nav_data")}${t("colon")}`, h("a", { href: `#/data/${encodeURIComponent(data)}` }, h("code", {}, data.slice(0, 16)))));
  if (Object.keys(auto).length) {
    const rows = Object.entries(auto).map(([key, { value, reason }]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, key)), h("td", {}, h("b", {}, shown(value))), h("td", { class: "reason" }, reason)));
    parts.push(h("h3", {}, t("auto_became")), h("div", { class: "scroll" }, h("table", { class: "auto" }, h("thead", {}, h("tr", {}, ...["setting", "value", "reason"].map((name) => h("th", { scope: "col" }, t(name))))), h("tbody", {}, ...rows))));
  }
  const sections = Object.entries(flatten(config));
  parts.push(h("h3", {}, t("settings")), h("div", { class: "sections" }, ...sections.map(([name, values]) => h("section", {}, h("h4", {}, name || t("run")), keyValues(values)))));
  return { element: h("div", { class: "config" }, ...parts), key: JSON.stringify([config, auto]) };
}

const shown = (value) => (value === null || value === undefined ? format.NONE : Array.isArray(value) ? value.map(shown).join(", ") : typeof value === "object" ? JSON.stringify(value) : String(value));

function flatten(config) {
  const sections = { "": {} };
  for (const [name, value] of Object.entries(config)) {
    if (value !== null && typeof value === "object" && !Array.isArray(value)) sections[name] = value;
    else sections[""][name] = value;
  }
  return Object.fromEntries(Object.entries(sections).filter(([, values]) => Object.keys(values).length));
}

export function keyValues(values) {
  return h("dl", { class: "pairs" }, ...entriesOf(values).flatMap(([key, value]) => [h("dt", {}, key), h("dd", {}, shown(value))]));
}

// Of what is inside, too, by dotted keys.
function entriesOf(values, prefix = "") {
  return Object.entries(values).flatMap(([key, value]) => (value !== null && typeof value === "object" && !Array.isArray(value) ? entriesOf(value, `${prefix}${key}.`) : [[prefix + key, value]]));
}

export async function drawEnvironment({ get }) {
  const { environment = {} } = await get("");
  if (!Object.keys(environment).length) return { element: empty(t("no_environment")), key: "none" };
  const sections = Object.entries(flatten(environment)).map(([name, values]) => h("section", {}, h("h3", {}, name || t("machine")), keyValues(values)));
  return { element: h("div", { class: "sections" }, ...sections), key: JSON.stringify(environment) };
}

// -- Events and logs --

export async function drawEvents({ get }) {
  const { events } = await get("/events");
  if (!events.length) return { element: empty(t("no_events")), key: "none" };
  const rows = [...events].reverse().map((event) => h("tr", {}, h("td", { class: "nowrap" }, format.moment(event.time)), h("td", { class: "number" }, event.step ?? ""), h("td", { class: "nowrap" }, h("span", { class: `event-dot ${eventClass(event.kind)}` }), eventName(event.kind)), h("td", { class: "reason" }, eventFacts(event))));
  const heads = ["time", "axis_step", "event", "details"].map((name) => h("th", { scope: "col", class: name === "axis_step" ? "number" : "" }, t(name)));
  return { element: h("div", { class: "scroll" }, h("table", { class: "events-table" }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows))), key: String(events.length) };
}

let logFile = ""; // the one that was chosen last

export async function drawLogs({ get, again }) {
  const found = await get(`/logs?tail=${LOG_BYTES}${logFile ? `&file=${encodeURIComponent(logFile)}` : ""}`);
  if (!found.files.length) return { element: empty(t("no_logs")), key: "none" };
  const select = h("select", { "aria-label": t("file"), onchange: () => ((logFile = select.value), again()) }, ...found.files.map((name) => h("option", { value: name }, name)));
  select.value = found.file;
  const text = plain(found.text), area = h("pre", { class: "output", tabIndex: 0, "aria-label": t("tab_logs") }, text || t("no_output"));
  requestAnimationFrame(() => (area.scrollTop = area.scrollHeight));
  return { element: h("div", { class: "logs" }, h("div", { class: "toolbar" }, select, copyButton(() => text), h("small", { class: "faint" }, t("logs_as_written"))), area), key: `${found.file} ${text.length} ${text.slice(-200)}` };
}
