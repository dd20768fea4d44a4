// Several runs over each other: what differs in their settings, their curves, their samples side by side.
import { get, runPath } from "./api.js";
import { Curves } from "./curves.js";
import { download, h, icon } from "./dom.js";
import * as format from "./format.js";
import { t } from "./i18n.js";
import { findRun, isRunning, live, onLive } from "./live.js";
import { drawState, runLink } from "./run_parts.js";

const MOST = 6;
const MISSING = "–";

export function showCompare(root, _, names) {
  const ids = names.filter(Boolean).slice(0, MOST);
  if (!ids.length) {
    root.append(h("div", { class: "empty" }, h("h1", {}, t("compare")), h("p", {}, t("compare_none")), h("a", { class: "button", href: "#/runs" }, t("nav_runs"))));
    return undefined;
  }
  const runs = ids.map((id) => ({ id, name: id, currency: findRun(id)?.currency ?? "" }));
  const curves = new Curves(runs, () => ids.some((id) => isRunning(findRun(id))));
  const results = h("div", { class: "scroll" }), settings = h("div"), samples = h("div");
  const csv = h("button", { type: "button", onclick: () => download("runs.csv", "text/csv", toCsv(ids, settings.rows ?? [])) }, icon("save"), "CSV");
  root.append(h("a", { class: "back", href: "#/runs" }, icon("left"), t("nav_runs")),
    h("header", { class: "page-head" }, h("h1", {}, t("compare_n", { n: ids.length })), csv), results, h("h2", { class: "hidden" }, t("curves")), curves.element, h("h2", {}, t("differing")), settings, h("h2", {}, t("tab_samples")), samples);
  const end = onLive(() => drawResults(results, ids));
  load(ids, settings, samples);
  return () => {
    end();
    curves.destroy();
  };
}

const swatch = (i) => h("i", { class: `swatch c${i % 6}` });
const runHeads = (ids) => ids.map((id, i) => h("th", { scope: "col" }, swatch(i), h("a", { href: runLink(id) }, id)));

function drawResults(root, ids) {
  const runs = ids.map(findRun), cells = (make) => runs.map((run) => h("td", {}, run ? make(run) : MISSING));
  const lines = [
    ["column_state", drawState], ["column_progress", (run) => t("of_steps", { step: format.count(run.step), total: format.count(run.total_steps) })], ["column_loss", (run) => format.number(run.loss)],
    ["column_speed", (run) => (Number.isFinite(run.tokens_per_second) ? t("per_second", { n: format.compact(run.tokens_per_second) }) : MISSING)], ["memory", (run) => format.bytes(run.memory)],
    ["column_money", (run) => (run.money || run.currency ? format.money(run.money, run.currency) : MISSING)], ["time", (run) => format.duration(run.seconds)],
  ];
  const key = JSON.stringify([runs, live.loaded]);
  if (root.dataset.key === key) return;
  root.dataset.key = key;
  root.replaceChildren(h("table", { class: "compared" }, h("thead", {}, h("tr", {}, h("td"), ...runHeads(ids))), h("tbody", {}, ...lines.map(([name, make]) => h("tr", {}, h("th", { scope: "row" }, t(name)), ...cells(make))))));
}

async function load(ids, settings, samples) {
  settings.replaceChildren(h("p", { class: "empty" }, t("loading")));
  const ask = (id, rest, none) => get(runPath(id, rest)).catch(() => none);
  const details = await Promise.all(ids.map((id) => ask(id, "", {})));
  const flat = details.map(({ config }) => flatten(config ?? {}));
  const keys = [...new Set(flat.flatMap((one) => [...one.keys()]))].filter((key) => new Set(flat.map((one) => one.get(key) ?? MISSING)).size > 1);
  settings.rows = keys.map((key) => [key, ...flat.map((one) => one.get(key) ?? MISSING)]);
  settings.replaceChildren(keys.length ? h("div", { class: "scroll" }, h("table", { class: "compared" }, h("thead", {}, h("tr", {}, h("td"), ...runHeads(ids))), h("tbody", {}, ...settings.rows.map(([key, ...values]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, key)), ...values.map((value) => h("td", {}, value))))))) : h("p", { class: "empty" }, t("same_settings")));
  const all = await Promise.all(ids.map((id) => ask(id, "/samples", { samples: [] })));
  samples.replaceChildren(drawSamples(ids, all.map((one) => one.samples)));
}

function flatten(values, prefix = "", found = new Map()) {
  for (const [key, value] of Object.entries(values)) {
    if (value !== null && typeof value === "object" && !Array.isArray(value)) flatten(value, `${prefix}${key}.`, found);
    else found.set(prefix + key, value === null ? MISSING : typeof value === "object" ? JSON.stringify(value) : String(value));
  }
  return found;
}

// Of each prompt the last text of each run.
function drawSamples(ids, all) {
  const prompts = [...new Set(all.flat().map((one) => one.prompt))];
  if (!prompts.length) return h("p", { class: "empty" }, t("no_samples"));
  const last = (samples, prompt) => samples.findLast((one) => one.prompt === prompt);
  return h("div", { class: "samples" }, ...prompts.map((prompt) => h("article", { class: "sample" }, h("h3", {}, prompt), h("div", { class: "side-by-side" }, ...ids.map((id, i) => {
    const found = last(all[i], prompt);
    return h("div", {}, h("h4", {}, swatch(i), id, found ? h("small", {}, ` ${t("at_step", { step: format.count(found.step) })}`) : null), h("p", { class: "written" }, found?.text ?? MISSING));
  })))));
}

function toCsv(ids, rows) {
  const facts = ["state", "step", "total_steps", "loss", "tokens_per_second", "memory", "money", "currency", "seconds"].map((name) => [name, ...ids.map((id) => findRun(id)?.[name] ?? "")]);
  const cell = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  return [["", ...ids], ...facts, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
