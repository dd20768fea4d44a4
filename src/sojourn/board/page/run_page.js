// One run: where it stands, its curves, and everything about it in tabs.
import { get, runPath } from "./api.js";
import { Curves } from "./curves.js";
import { h, icon } from "./dom.js";
import * as format from "./format.js";
import { t } from "./i18n.js";
import { findRun, isRunning, live, onLive } from "./live.js";
import { actionsOf, drawProgress, drawState, gpuUse, moneyLine, tagList } from "./run_parts.js";
import { drawCheckpoints, drawConfig, drawEnvironment, drawEvents, drawLogs, drawSamples } from "./run_tabs.js";

const TABS = { curves: null, samples: drawSamples, checkpoints: drawCheckpoints, config: drawConfig, events: drawEvents, logs: drawLogs, environment: drawEnvironment };
const DETAIL_SECONDS = 10;
let chosen = "curves"; // while the page is open

export function showRun(root, id) {
  const head = h("header", { class: "page-head" }), facts = h("dl", { class: "facts" }), message = h("p", { class: "error", role: "alert", hidden: true });
  const curves = new Curves([{ id, name: id.split(":").at(-1), currency: findRun(id)?.currency ?? "" }], () => isRunning(findRun(id)));
  const tabs = new Tabs(id, curves.element);
  root.append(h("a", { class: "back", href: "#/runs" }, icon("left"), t("nav_runs")), head, message, facts, tabs.element);
  const update = () => {
    const run = findRun(id);
    Object.assign(message, { hidden: Boolean(run) || !live.loaded, textContent: t("run_gone", { name: id }) });
    if (!run && !head.childElementCount) head.replaceChildren(h("h1", {}, id));
    if (!run) return;
    curves.setCurrency(run.currency);
    drawHead(head, run);
    drawFacts(facts, run);
    tabs.update(run);
  };
  const end = onLive(update);
  return () => {
    end();
    curves.destroy();
    tabs.destroy();
  };
}

function drawHead(head, run) {
  const actions = actionsOf(run), key = JSON.stringify([run.state, run.phase, run.tags, run.message, actions.map(({ name }) => name)]);
  if (head.dataset.key === key) return;
  head.dataset.key = key;
  const buttons = actions.map(({ icon: name, text, act }) => h("button", { type: "button", onclick: act }, icon(name), text));
  const report = run.host ? null : h("a", { class: "button", href: runPath(run.id, "/report.html"), download: `${run.name}.html` }, icon("file"), t("report"));
  head.replaceChildren(h("div", { class: "title" }, h("h1", {}, run.name), drawState(run), run.host && h("span", { class: "tag host-tag" }, run.host), ...tagList(run)),
    h("div", { class: "group" }, ...buttons, ...(report ? [report] : [])), run.message && !isRunning(run) ? h("p", { class: run.state === "failed" ? "error" : "faint" }, run.message) : "");
}

function drawFacts(facts, run) {
  const limits = Object.entries(run.limits ?? {}).filter(([, value]) => value && value !== "auto" && value !== "off").map(([name, value]) => `${t(`limit_${name}`)} ${value}`);
  const gpu = gpuUse(run.gpu);
  const all = [
    [t("progress"), drawProgress(run), "wide"],
    [t("column_loss"), format.number(run.loss)],
    [t("column_speed"), Number.isFinite(run.tokens_per_second) ? t("per_second", { n: format.compact(run.tokens_per_second) }) : format.NONE, "", Number.isFinite(run.mfu) ? `MFU ${format.percent(run.mfu, 1)}` : ""],
    [t("memory"), format.bytes(run.memory), "", gpu && `GPU ${gpu}`],
    [t("column_money"), run.money || run.currency ? format.money(run.money, run.currency) : format.NONE, "", moneyLine(run)],
    [t("time"), format.duration(run.seconds), "", Number.isFinite(run.left) ? t("left", { time: format.duration(run.left) }) : ""],
    [t("limits"), limits.join(" · ") || t("no_limits")],
  ];
  facts.replaceChildren(...all.map(([name, value, style = "", more]) => h("div", { class: style }, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null))));
}

class Tabs {
  constructor(id, curves) {
    [this.id, this.curves] = [id, curves];
    this.loaded = 0;
    this.buttons = Object.keys(TABS).map((name) => h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "tab-panel", onclick: () => this.choose(name) }, t(`tab_${name}`)));
    this.list = h("div", { class: "tabs", role: "tablist", onkeydown: (event) => this.key(event) }, ...this.buttons);
    this.other = h("div");
    this.title = h("h2", { class: "hidden" });
    this.panel = h("div", { id: "tab-panel", role: "tabpanel" }, this.title, this.curves, this.other);
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.element = h("section", { class: "tabbed" }, this.list, this.error, this.panel);
    this.stopper = new AbortController();
    this.choose(chosen);
  }

  destroy() {
    this.stopper.abort();
  }

  key(event) {
    const names = Object.keys(TABS), at = names.indexOf(chosen), to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.choose(names.at(to % names.length));
    this.buttons[names.indexOf(chosen)].focus();
  }

  choose(name) {
    chosen = name;
    Object.keys(TABS).forEach((one, i) => {
      this.buttons[i].setAttribute("aria-selected", String(one === name));
      this.buttons[i].tabIndex = one === name ? 0 : -1;
    });
    this.panel.setAttribute("aria-labelledby", `tab-${name}`);
    this.title.textContent = t(`tab_${name}`);
    this.curves.hidden = name !== "curves";
    this.other.hidden = name === "curves";
    if (name !== "curves") this.show();
  }

  // What the tab needs is asked for when it is opened, and while the run goes on.
  async show() {
    const name = chosen;
    this.loaded = performance.now();
    this.loading = true;
    try {
      const drawn = await TABS[name]({ id: this.id, run: findRun(this.id), get: (rest) => get(runPath(this.id, rest), this.stopper.signal), again: () => this.show() });
      if (name !== chosen) return;
      if (this.shown !== name || this.key_ !== drawn.key) {
        this.other.replaceChildren(drawn.element);
      }
      [this.shown, this.key_] = [name, drawn.key];
      this.error.hidden = true;
    } catch (error) {
      if (error.name === "AbortError") return;
      if (this.shown !== name) this.other.replaceChildren();
      this.shown = null;
      Object.assign(this.error, { hidden: false, textContent: error.message || t("board_gone_short") });
    } finally {
      this.loading = false;
    }
  }

  update(run) {
    const ended = this.state !== undefined && this.state !== run.state;
    this.state = run.state;
    const due = performance.now() - this.loaded > DETAIL_SECONDS * 1000 && isRunning(run);
    if ((ended || due) && chosen !== "curves" && !this.loading && !this.panel.contains(document.activeElement)) this.show();
  }
}
