// Pieces of a run that several pages show: its state, progress, loss so far, money; and what one can do with it.
import { h, svg } from "./dom.js";
import { askAction } from "./dialog.js";
import * as format from "./format.js";
import { t } from "./i18n.js";
import { askNow, isRunning, live } from "./live.js";
import { runPath } from "./api.js";

const STATES = new Set(["starting", "running", "stopped", "done", "failed", "unknown", "unreachable", "lost", "preparing", "queued"]);
export const stateName = (state) => (STATES.has(state) ? t(`state_${state}`) : state);
const PHASES = new Set(["prepare", "rehearse", "train", "verify"]);
export const phaseName = (phase) => (PHASES.has(phase) ? t(`phase_${phase}`) : phase);
export const runLink = (id) => `#/run/${encodeURIComponent(id)}`;

export function drawState(run) {
  const phase = run.phase && run.phase !== run.state ? ` · ${phaseName(run.phase)}` : "";
  return h("span", { class: "state" }, h("span", { class: `dot ${run.state}` }), `${stateName(run.state)}${phase}`);
}

export function drawProgress(run) {
  const share = run.total_steps ? Math.min(1, run.step / run.total_steps) : 0;
  const text = run.total_steps ? t("of_steps", { step: format.count(run.step), total: format.count(run.total_steps) }) : t("no_steps");
  const bar = h("div", { class: `bar ${run.state}`, role: "progressbar", "aria-valuenow": Math.round(share * 100), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": t("progress") }, h("i"));
  bar.firstChild.style.width = `${share * 100}%`;
  return h("div", { class: "progress" }, bar, h("small", {}, text, run.total_steps ? h("b", {}, format.percent(share)) : null));
}

// Losses as one small line; null where a value is missing.
export function sparkline(values, width = 120, height = 26) {
  const found = values.filter((value) => value !== null && Number.isFinite(value));
  const drawing = svg("svg", { class: "sparkline", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": found.length ? t("sparkline", { from: format.number(found[0]), to: format.number(found.at(-1)) }) : t("no_values") });
  if (found.length < 2) return drawing;
  const low = Math.min(...found), high = Math.max(...found), span = high - low || 1;
  let d = "", pen = "M";
  values.forEach((value, i) => {
    if (value === null || !Number.isFinite(value)) return void (pen = "M");
    d += `${pen}${((i / (values.length - 1)) * width).toFixed(1)} ${(2 + (1 - (value - low) / span) * (height - 4)).toFixed(1)}`;
    pen = "L";
  });
  drawing.append(svg("path", { d }));
  return drawing;
}

export function moneyLine(run) {
  const limit = run.limits?.budget, projected = run.projected;
  const parts = [];
  if (Number.isFinite(projected)) parts.push(t("projected", { money: format.money(projected, run.currency) }));
  if (limit) parts.push(t("of_limit", { limit }));
  return parts.join(" · ");
}

// How busy GPUs are: { utilization: percent, memory_used, memory_total: bytes }.
export function gpuUse(gpu) {
  if (!gpu) return "";
  const memory = gpu.memory_total ? `${format.gib(gpu.memory_used)}\u00a0/\u00a0${format.gib(gpu.memory_total)}\u00a0GiB` : "";
  return [Number.isFinite(gpu.utilization) ? format.percent(gpu.utilization / 100) : "", memory].filter(Boolean).join(" · ");
}

export function tagList(run) {
  return (run.tags ?? []).map((tag) => h("span", { class: "tag" }, tag));
}

// What can be done with a run now, as entries of a menu or buttons. Each asks before it does anything.
export function actionsOf(run) {
  const can = { stop: isRunning(run), resume: run.resumable && !isRunning(run) && !run.host, pull: run.host, move: run.host && live.hosts.length > 1 };
  return ACTIONS.filter(({ name }) => can[name]).map(({ name, icon, make }) => ({ name, icon, text: t(`action_${name}`), act: () => make(run) }));
}

const simple = (name, more = {}) => (run) => askAction({
  title: t(`ask_${name}`, { name: run.name }), text: t(`ask_${name}_text`), button: t(`action_${name}`), path: runPath(run.id, `/${name}`), done: askNow, ...more,
});

const ACTIONS = [
  { name: "stop", icon: "stop", make: simple("stop", { danger: true }) },
  { name: "resume", icon: "play", make: simple("resume") },
  { name: "pull", icon: "pull", make: (run) => simple("pull", {
    fields: [{ name: "what", label: t("pull_what"), options: ["final", "best", "checkpoint", "all"].map((value) => ({ value, text: t(`pull_${value}`) })) }],
    body: ({ what }) => ({ what }),
  })(run) },
  { name: "move", icon: "move", make: (run) => simple("move", {
    fields: [{ name: "to", label: t("move_to"), options: live.hosts.map(({ name }) => name).filter((name) => name !== run.host).map((name) => ({ value: name, text: name })) }],
    body: ({ to }) => ({ to }),
  })(run) },
];
