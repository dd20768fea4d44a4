// All runs: a table on a wide screen, cards on a phone. Rows stay in place while their numbers change.
import { get, poll, post, runPath } from "./api.js";
import { ask } from "./dialog.js";
import { copyButton, h, icon } from "./dom.js";
import * as format from "./format.js";
import { t } from "./i18n.js";
import { askNow, isRunning, live, onLive } from "./live.js";
import { menu } from "./menu.js";
import { actionsOf, drawProgress, drawState, gpuUse, moneyLine, runLink, sparkline, stateName, tagList } from "./run_parts.js";

const GROUPS = { all: () => true, running: isRunning, stopped: (run) => run.state === "stopped", done: (run) => run.state === "done", failed: (run) => ["failed", "lost", "unknown", "unreachable"].includes(run.state) };
const value = (number, other = -Infinity) => (Number.isFinite(number) ? number : other);
const SORTS = {
  updated: (run) => -value(run.updated), name: (run) => run.name.toLowerCase(), state: (run) => stateName(run.state),
  progress: (run) => -(run.total_steps ? run.step / run.total_steps : 0), loss: (run) => value(run.loss, Infinity),
  speed: (run) => -value(run.tokens_per_second), money: (run) => -value(run.money), left: (run) => value(run.left, Infinity),
};
const COLUMNS = ["name", "state", "progress", "loss", "speed", "money", "left"];
const SPARK_SECONDS = 6, MOST_IDS = 50;
const kept = { filter: "", group: "all", sort: "updated", reverse: false, selected: new Set() }; // while the page is open
const sparklines = new Map();

export function showRuns(root) {
  const page = new RunsPage(root);
  const ends = [onLive(() => page.update()), ...page.pollers.map((poller) => () => poller.stop())];
  return () => ends.forEach((end) => end());
}

class RunsPage {
  constructor(root) {
    this.rows = new Map();
    this.filter = h("input", { type: "search", value: kept.filter, placeholder: t("filter_runs"), "aria-label": t("filter_runs"), oninput: () => ((kept.filter = this.filter.value), this.update()) });
    this.groups = h("div", { class: "chips", role: "group", "aria-label": t("state") });
    this.sort = h("select", { class: "sort", "aria-label": t("sort_by"), onchange: () => this.sortBy(this.sort.value) }, ...Object.keys(SORTS).map((name) => h("option", { value: name }, t(`column_${name}`))));
    this.hosts = h("div", { class: "hosts" });
    this.body = h("tbody");
    this.heads = COLUMNS.map((name) => h("th", { scope: "col", class: `c-${name}` }, h("button", { type: "button", onclick: () => this.sortBy(name) }, t(`column_${name}`))));
    this.table = h("table", { class: "runs-table" }, h("thead", {}, h("tr", {}, h("th", { class: "c-select" }, h("span", { class: "hidden" }, t("select"))), ...this.heads, h("th", { class: "c-menu" }, h("span", { class: "hidden" }, t("actions"))))), this.body);
    this.empty = h("div", { class: "empty" });
    this.compare = h("div", { class: "float", hidden: true });
    root.append(
      h("header", { class: "page-head" }, h("h1", {}, t("nav_runs")), h("a", { class: "button primary", href: "#/new" }, icon("plus"), t("nav_new"))),
      h("div", { class: "toolbar" }, this.filter, this.groups, this.sort), this.hosts, this.table, this.empty, this.compare);
    this.pollers = [poll((signal) => this.loadSparklines(signal), SPARK_SECONDS, 30)];
  }

  sortBy(name) {
    kept.reverse = kept.sort === name ? !kept.reverse : false;
    kept.sort = name;
    this.update();
  }

  shown() {
    const words = kept.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const texts = (run) => [run.name, run.host, run.model, run.method, run.state, stateName(run.state), ...(run.tags ?? [])].join(" ").toLowerCase();
    const found = live.runs.filter((run) => GROUPS[kept.group](run) && words.every((word) => texts(run).includes(word)));
    const key = SORTS[kept.sort], sign = kept.reverse ? -1 : 1;
    return found.map((run) => [key(run), run]).sort(([a], [b]) => sign * (a < b ? -1 : a > b ? 1 : 0)).map(([, run]) => run);
  }

  update() {
    const shown = this.shown();
    this.drawGroups();
    this.drawHosts();
    this.sort.value = kept.sort;
    COLUMNS.forEach((name, i) => this.heads[i].setAttribute("aria-sort", kept.sort === name ? (kept.reverse ? "descending" : "ascending") : "none"));
    for (const run of shown) {
      if (!this.rows.has(run.id)) this.rows.set(run.id, new Row(run.id, () => this.drawCompare()));
      this.rows.get(run.id).update(run);
    }
    const order = shown.map((run) => this.rows.get(run.id).element);
    if (order.length !== this.body.children.length || order.some((row, i) => this.body.children[i] !== row)) keepFocus(() => this.body.replaceChildren(...order));
    this.table.hidden = !shown.length;
    this.drawEmpty(shown.length);
    for (const id of kept.selected) if (!live.runs.some((run) => run.id === id)) kept.selected.delete(id);
    this.drawCompare();
    if (shown.some((run) => !sparklines.has(run.id)) && !this.asked) {
      this.asked = true;
      this.pollers[0].now();
    }
  }

  drawGroups() {
    const counts = Object.entries(GROUPS).map(([name, test]) => [name, live.runs.filter(test).length]);
    const key = `${kept.group} ${counts}`;
    if (this.groups.dataset.key === key) return;
    this.groups.dataset.key = key;
    keepFocus(() => this.groups.replaceChildren(...counts.map(([name, n]) => h("button", { type: "button", "data-focus": `group-${name}`, "aria-pressed": String(kept.group === name), onclick: () => ((kept.group = name), this.update()) }, t(`group_${name}`), h("b", {}, String(n))))));
  }

  drawHosts() {
    const here = live.gpus.length ? [{ name: t("this_machine"), state: "ok", gpus: live.gpus }] : [];
    const all = [...here, ...live.hosts], key = JSON.stringify(all.map(({ name, state, error, gpus }) => [name, state, error, gpus]));
    if (this.hosts.dataset.key === key) return;
    this.hosts.dataset.key = key;
    this.hosts.replaceChildren(...all.map(({ name, state, error, gpus }) => h("span", { class: `host ${state}`, title: error ?? "" }, h("span", { class: `dot ${state === "ok" ? "done" : state === "asking" ? "starting" : "failed"}` }),
      gpus.length && state === "ok" ? `${name}:` : `${name}${t("colon")}${t(`host_${state}`)}`, error ? h("small", {}, ` ${error}`) : null, ...gpus.map((gpu) => h("small", { class: "gpu" }, ` ${gpu.name.replace(/^NVIDIA (GeForce )?/, "")} ${gpuUse(gpu)}`)))));
  }

  drawEmpty(shown) {
    const kind = !live.loaded ? "asking" : shown ? "" : live.runs.length ? "filtered" : "none";
    if (this.empty.dataset.kind === kind) return;
    this.empty.dataset.kind = kind;
    this.empty.hidden = !kind;
    if (kind === "asking") this.empty.replaceChildren(h("p", {}, t("loading")));
    else if (kind === "filtered") this.empty.replaceChildren(h("p", {}, t("no_match")), h("button", { type: "button", onclick: () => ((this.filter.value = kept.filter = ""), (kept.group = "all"), this.update()) }, t("show_all")));
    else if (kind === "none") this.empty.replaceChildren(h("h2", {}, t("no_runs")), h("p", {}, t("no_runs_text")), ...["sojourn demo", "sojourn train small", "sojourn host add NAME"].map(commandLine));
  }

  drawCompare() {
    const ids = [...kept.selected];
    this.compare.hidden = !ids.length;
    const key = ids.join(",");
    if (this.compare.dataset.key === key) return;
    this.compare.dataset.key = key;
    const address = `#/compare/${ids.map(encodeURIComponent).join(",")}`;
    this.compare.replaceChildren(h("span", {}, t("selected", { n: ids.length })),
      ids.length > 1 ? h("a", { class: "button primary", href: address }, icon("columns"), t("compare")) : h("span", { class: "faint" }, t("select_more")),
      h("button", { type: "button", onclick: () => (kept.selected.clear(), this.rows.forEach((row) => row.select()), this.drawCompare()) }, t("clear")));
  }

  async loadSparklines(signal) {
    const wanted = this.shown().filter((run) => !sparklines.has(run.id) || isRunning(run)).map((run) => run.id);
    for (let at = 0; at < wanted.length; at += MOST_IDS) {
      const ids = wanted.slice(at, at + MOST_IDS);
      const found = await get(`/api/sparklines?${new URLSearchParams(ids.map((id) => ["id", id]))}`, signal);
      for (const id of ids) sparklines.set(id, found[id] ?? []);
      for (const id of ids) this.rows.get(id)?.drawSparkline();
    }
    this.asked = false;
  }
}

class Row {
  constructor(id, onSelect) {
    this.id = id;
    this.cells = Object.fromEntries([...COLUMNS, "menu"].map((name) => [name, h("td", { class: `c-${name}` })]));
    this.box = h("input", { type: "checkbox", onchange: () => {
      if (this.box.checked) kept.selected.add(id);
      else kept.selected.delete(id);
      onSelect();
    } });
    this.spark = h("span", { class: "spark" });
    this.loss = h("b");
    this.cells.loss.append(this.loss, this.spark);
    this.cells.menu.append(menu("more", t("actions"), () => [...actionsOf(this.run), { text: t("tags_edit"), act: () => editTags(this.run) }]));
    this.element = h("tr", {}, h("td", { class: "c-select" }, this.box), ...Object.values(this.cells));
    this.select();
    this.drawSparkline();
  }

  select() {
    this.box.checked = kept.selected.has(this.id);
  }

  drawSparkline() {
    const found = sparklines.get(this.id);
    if (found) this.spark.replaceChildren(sparkline(found));
  }

  update(run) {
    this.run = run;
    const key = JSON.stringify({ ...run, age: format.ago(run.updated, live.now) });
    if (key === this.key) return;
    this.key = key;
    this.box.setAttribute("aria-label", t("select_run", { name: run.name }));
    this.set("name", h("a", { href: runLink(run.id), class: "run-name" }, run.name), h("small", {}, [run.model, run.method].filter(Boolean).join(" · ")), run.host ? h("span", { class: "tag host-tag" }, run.host) : null, ...tagList(run));
    this.set("state", drawState(run), h("small", { title: run.message || "" }, run.message && ["failed", "unknown", "unreachable"].includes(run.state) ? run.message : format.ago(run.updated, live.now)));
    this.set("progress", drawProgress(run));
    this.loss.textContent = format.number(run.loss);
    const memory = Number.isFinite(run.memory) ? format.bytes(run.memory) : "", use = run.gpu?.utilization;
    this.set("speed", h("b", {}, Number.isFinite(run.tokens_per_second) ? t("per_second", { n: format.compact(run.tokens_per_second) }) : format.NONE),
      h("small", {}, [Number.isFinite(use) ? `GPU\u00a0${format.percent(use / 100)}` : "", Number.isFinite(run.mfu) ? `MFU\u00a0${format.percent(run.mfu, 1)}` : "", memory].filter(Boolean).join(" · ")));
    this.set("money", h("b", {}, run.money || run.currency ? format.money(run.money, run.currency) : format.NONE), h("small", {}, moneyLine(run)));
    const limit = run.limits?.time ? t("of_limit", { limit: run.limits.time }) : "";
    this.set("left", h("b", {}, Number.isFinite(run.left) ? t("left", { time: format.duration(run.left) }) : format.NONE), h("small", {}, [t("spent_time", { time: format.duration(run.seconds) }), limit].filter(Boolean).join(" · ")));
  }

  set(name, ...children) {
    const cell = this.cells[name], focused = cell.contains(document.activeElement);
    cell.replaceChildren(...children.filter(Boolean));
    if (focused) cell.querySelector("a")?.focus();
  }
}

function editTags(run) {
  ask({
    title: t("tags_of", { name: run.name }), button: t("save"), fields: [{ name: "tags", label: t("tags_hint"), value: (run.tags ?? []).join(", ") }],
    act: async ({ tags }) => {
      await post(runPath(run.id, "/tags"), { tags: tags.split(/[,，]/).map((tag) => tag.trim()).filter(Boolean) });
      return askNow;
    },
  });
}

export function commandLine(line) {
  return h("div", { class: "command" }, h("code", {}, line), copyButton(() => line));
}

function keepFocus(change) {
  const before = document.activeElement, key = before?.dataset?.focus;
  change();
  if (key) document.querySelector(`[data-focus="${key}"]`)?.focus();
  else if (before?.isConnected && before !== document.body && document.activeElement !== before) before.focus({ preventScroll: true });
}
