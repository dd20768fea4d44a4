// The curves of one run or of several over each other: charts that share axis, zoom, smoothing and cursor, and stay up to date.
import { get, poll, runPath } from "./api.js";
import { Chart } from "./chart.js";
import { savePng, saveSvg } from "./chart_file.js";
import { h, icon, iconButton } from "./dom.js";
import * as format from "./format.js";
import { t } from "./i18n.js";
import { describeEvent, isMarked } from "./events.js";
import { menu } from "./menu.js";

const POINTS = 800, SECONDS = 2, AXES = ["step", "time", "tokens", "money"];
const KEPT = "sojourn.board.curves";
const percent = (value) => format.percent(value, 1);

// Charts in their order: the metrics of each, and how a value is written; `exact`: never smoothed; `zero`: the axis starts there. Only those that a run has appear.
const CHARTS = [
  { name: "loss", keys: ["loss", "eval/loss"], value: format.number },
  { name: "lr", keys: ["lr"], value: format.number, exact: true },
  { name: "grad_norm", keys: ["grad_norm"], value: format.number },
  { name: "tokens_per_second", keys: ["tokens_per_second"], value: format.compact },
  { name: "mfu", keys: ["mfu"], value: percent },
  { name: "memory", keys: ["memory", "memory_reserved"], value: format.bytes, binary: true, exact: true, zero: true },
  { name: "cost", keys: ["spent", "projected"], value: "money", exact: true, zero: true },
  { name: "accuracy", keys: ["eval/accuracy"], value: percent },
  { name: "perplexity", keys: ["eval/perplexity"], value: format.number },
  { name: "bits_per_byte", keys: ["eval/bits_per_byte"], value: format.number },
  { name: "data_wait", keys: ["data_wait"], value: percent },
];
const NOT_DRAWN = new Set(["epoch", "eta", "step", "time", "tokens", "kind"]);

function chartsOf(keys) {
  const known = CHARTS.filter((one) => one.keys.some((key) => keys.has(key)));
  const named = new Set(CHARTS.flatMap((one) => one.keys));
  const others = [...keys].filter((key) => !named.has(key) && !NOT_DRAWN.has(key)).sort();
  return [...known, ...others.map((key) => ({ name: key, title: key, keys: [key], value: format.number }))];
}

const seriesName = (key) => t(`series_${key.replace("/", "_")}`);

function loadKept() {
  const usual = { axis: "step", logY: false, smoothing: 0.3 };
  try {
    const kept = { ...usual, ...JSON.parse(localStorage.getItem(KEPT) ?? "{}") };
    return AXES.includes(kept.axis) && kept.smoothing >= 0 && kept.smoothing <= 1 ? kept : usual;
  } catch {
    return usual;
  }
}

export class Curves {
  // runs: [{ id, name, currency }]; `running()`: whether any of them goes on; `only`: names of charts, in place of all.
  constructor(runs, running) {
    this.runs = runs;
    this.running = running;
    this.options = loadKept();
    this.hidden = new Set();
    this.domain = null;
    this.keys = new Set(["loss", "lr", "grad_norm", "tokens_per_second"]);
    this.data = new Map(runs.map(({ id }) => [id, { version: -1, series: {}, zoomed: null, events: [] }]));
    this.charts = new Map();
    this.grid = h("div", { class: "charts" });
    this.notice = h("p", { class: "error", role: "alert", hidden: true });
    const legend = runs.length > 1 ? h("div", { class: "legend runs-legend", role: "group", "aria-label": t("nav_runs") }, ...runs.map((run, i) => this.runButton(run, i))) : null;
    this.element = h("section", { class: "curves", "aria-label": t("curves") }, this.drawToolbar(), ...(legend ? [legend] : []), this.notice, this.grid);
    this.poller = poll((signal) => this.load(signal), SECONDS);
  }

  destroy() {
    this.poller.stop();
    for (const chart of this.charts.values()) chart.chart.destroy();
  }

  // Known a moment after the curves of a new run.
  setCurrency(currency) {
    if (currency === this.runs[0].currency) return;
    this.runs[0].currency = currency;
    this.scheduleDraw();
  }

  // -- Data --

  async load(signal) {
    const asked = this.question();
    const first = [...this.data.values()].every((one) => one.version < 0);
    const running = this.running();
    if (!first && !running && this.complete === asked) return;
    const answers = await Promise.all(this.runs.map((run) => this.loadRun(run, asked, signal)));
    if (asked !== this.question()) return this.poller.now(); // the axis was changed meanwhile
    const keys = new Set(this.keys);
    for (const found of answers) for (const key of found?.keys ?? []) keys.add(key);
    const grown = [...keys].some((key) => !NOT_DRAWN.has(key) && !this.keys.has(key));
    this.keys = keys;
    if (grown) {
      for (const one of this.data.values()) one.version = -1;
      return this.load(signal);
    }
    const partial = answers.some((found) => found?.partial);
    this.complete = running || partial ? null : asked; // asked once more after its end
    this.draw();
  }

  question() {
    return `${this.options.axis} ${this.domain ?? ""}`;
  }

  async loadRun(run, asked, signal) {
    const kept = this.data.get(run.id), { axis } = this.options;
    const keys = [...this.keys].filter((key) => !NOT_DRAWN.has(key)).map(encodeURIComponent).join(",");
    const version = kept.asked === asked ? kept.version : -1;
    const range = this.domain ? `&low=${this.domain[0]}&high=${this.domain[1]}` : "";
    try {
      const found = await get(runPath(run.id, `/series?keys=${keys}&x=${axis}&points=${POINTS}&version=${version}${range}`), signal);
      if (found.unchanged || asked !== this.question()) return null;
      if (this.domain) kept.zoomed = found.series;
      else Object.assign(kept, { series: found.series, zoomed: null });
      Object.assign(kept, { version: found.version, asked });
      const { events } = await get(runPath(run.id, `/events?x=${axis}`), signal);
      kept.events = events;
      this.showError("");
      return found;
    } catch (error) {
      if (error.status) this.showError(error.message);
      else throw error;
      return null;
    }
  }

  showError(text) {
    this.notice.hidden = !text;
    this.notice.textContent = text;
  }

  // -- Drawing --

  draw() {
    const wanted = chartsOf(this.present());
    for (const one of wanted) if (!this.charts.has(one.name)) this.addChart(one);
    const order = wanted.map((one) => this.charts.get(one.name).element);
    if (order.some((element, i) => this.grid.children[i] !== element) || this.grid.children.length !== order.length) this.grid.replaceChildren(...order);
    const xs = [...this.data.values()].flatMap(({ series }) => Object.values(series)).filter(({ x }) => x.length).flatMap(({ x }) => [x[0], x.at(-1)]);
    const whole = xs.length ? [Math.min(...xs), Math.max(...xs)] : null;
    for (const one of wanted) this.fill(one, whole);
    if (!order.length) this.grid.replaceChildren(h("p", { class: "empty" }, t("no_metrics")));
  }

  present() {
    const keys = new Set();
    for (const { series } of this.data.values()) for (const [key, { x }] of Object.entries(series)) if (x.length) keys.add(key);
    return keys;
  }

  addChart(one) {
    const title = one.title ?? t(`metric_${one.name}`);
    const hooks = { zoom: (low, high = null) => this.zoom(low === null ? null : [low, high]), cursor: (x, chart) => this.moveCursor(x, chart) };
    const chart = new Chart({ title, value: one.value === "money" ? (value) => format.money(value, this.runs[0].currency) : one.value, binary: one.binary, zero: one.zero, hooks });
    const legend = h("div", { class: "legend" }), last = h("span", { class: "last" });
    const tools = menu("more", t("save_chart"), () => this.fileItems(one, chart));
    const element = h("figure", { class: "panel" }, h("figcaption", {}, h("h3", {}, title), last, legend, tools), chart.element);
    this.charts.set(one.name, { chart, legend, last, element });
  }

  fileItems(one, chart) {
    const name = `${this.runs.map((run) => run.name).join("-").slice(0, 60)}-${one.name}`;
    const legend = chart.shown().map(({ name, color, dashed }) => ({ name, color, dashed }));
    const keys = one.keys.map(encodeURIComponent).join(",");
    const csv = this.runs.map((run) => ({ text: this.runs.length > 1 ? `CSV · ${run.name}` : "CSV", href: runPath(run.id, `/series.csv?keys=${keys}&x=${this.options.axis}`) }));
    return [{ text: "PNG", act: () => savePng(chart, name, legend) }, { text: "SVG", act: () => saveSvg(chart, name, legend) }, ...csv];
  }

  fill(one, whole) {
    const { chart, legend, last } = this.charts.get(one.name), series = [], many = this.runs.length > 1;
    this.runs.forEach((run, number) => {
      const { series: whole, zoomed } = this.data.get(run.id);
      one.keys.forEach((key, at) => {
        const found = merge(whole[key], this.domain && zoomed?.[key], this.domain);
        if (!found?.x.length) return;
        const name = [many ? run.name : "", one.keys.length > 1 ? seriesName(key) : ""].filter(Boolean).join(" · ") || chart.title;
        series.push({ id: `${run.id} ${key}`, name, color: many ? number % 6 : at % 6, dashed: many && at > 0, exact: key.startsWith("eval/"), ...found });
      });
    });
    const { axis, logY, smoothing } = this.options;
    const place = (event) => event.x ?? (axis === "step" ? event.step : null);
    const events = many ? [] : this.data.get(this.runs[0].id).events.filter((event) => isMarked(event) && Number.isFinite(place(event))).map((event) => ({ x: place(event), kind: event.kind, text: describeEvent(event) }));
    chart.set({ series, events, axis, logY, smoothing: one.exact ? 0 : smoothing, whole, domain: this.domain, currency: this.runs[0].currency, hidden: this.hidden });
    last.textContent = series.length === 1 ? chart.value(series[0].y.findLast((y) => y !== null), 4) : "";
    this.drawLegend(legend, one, series);
  }

  // Of several runs all charts share one legend; a chart says only what its dashed lines are.
  runButton(run, number) {
    const button = h("button", { type: "button", "aria-pressed": "true", title: t("show_hide"), onclick: () => {
      const show = !this.toggle([...this.keys].map((key) => `${run.id} ${key}`));
      button.setAttribute("aria-pressed", String(show));
    } }, h("i", { class: `swatch c${number % 6}` }), run.name);
    return button;
  }

  toggle(ids) {
    const hide = !this.hidden.has(ids[0]);
    for (const id of ids) hide ? this.hidden.add(id) : this.hidden.delete(id);
    this.draw();
    return hide;
  }

  drawLegend(legend, one, series) {
    const many = this.runs.length > 1, key = many ? one.name : series.map(({ id }) => id).join("|");
    if (legend.dataset.key === key) return;
    legend.dataset.key = key;
    const dashes = one.keys.length > 1 ? one.keys.map((metric, at) => h("span", {}, h("i", { class: `swatch${at ? " dashed" : ""}` }), seriesName(metric))) : [];
    const buttons = series.length < 2 ? [] : series.map(({ id, name, color }) => {
      const button = h("button", { type: "button", "aria-pressed": "true", title: t("show_hide"), onclick: () => button.setAttribute("aria-pressed", String(!this.toggle([id]))) }, h("i", { class: `swatch c${color}` }), name);
      return button;
    });
    legend.replaceChildren(...(many ? dashes : buttons));
  }

  // -- Options that all charts share --

  drawToolbar() {
    const slider = h("input", { type: "range", min: 0, max: 1, step: 0.05, value: this.options.smoothing, oninput: () => this.change({ smoothing: Number(slider.value) }) });
    const axis = h("select", { onchange: () => this.change({ axis: axis.value }) }, ...AXES.map((one) => h("option", { value: one }, t(`axis_${one}`))));
    axis.value = this.options.axis;
    const log = h("input", { type: "checkbox", checked: this.options.logY, onchange: () => this.change({ logY: log.checked }) });
    const middle = (factor) => () => this.charts.values().next().value?.chart.zoomBy(factor);
    this.reset = h("button", { type: "button", class: "quiet", disabled: true, onclick: () => this.zoom(null) }, icon("reset"), t("whole_run"));
    return h("div", { class: "toolbar" },
      h("label", { class: "inline" }, t("smoothing"), slider),
      h("label", { class: "inline" }, t("x_axis"), axis),
      h("label", { class: "inline" }, log, t("log_scale")),
      h("span", { class: "group" }, iconButton("plus", "zoom_in", middle(0.5)), iconButton("minus", "zoom_out", middle(2)), this.reset));
  }

  change(options) {
    const again = options.axis && options.axis !== this.options.axis;
    Object.assign(this.options, options);
    localStorage.setItem(KEPT, JSON.stringify(this.options));
    if (again) {
      this.domain = null;
      this.reset.disabled = true;
      this.poller.now();
    } else this.scheduleDraw();
  }

  scheduleDraw() {
    this.drawing ??= requestAnimationFrame(() => {
      this.drawing = undefined;
      this.draw();
    });
  }

  zoom(domain) {
    this.domain = domain;
    this.reset.disabled = !domain;
    this.scheduleDraw();
    clearTimeout(this.asking);
    this.asking = setTimeout(() => this.poller.now(), 150); // finer data of this range
  }

  moveCursor(x, from) {
    for (const { chart } of this.charts.values()) if (chart !== from) chart.setCursor(x);
  }
}

// Finer data of a range between coarse data outside of it, so that one can still move and zoom out.
function merge(whole, zoomed, domain) {
  if (!zoomed?.x.length || !whole?.x.length) return whole;
  const [low, high] = [zoomed.x[0], zoomed.x.at(-1)];
  if (low > domain[1] || high < domain[0]) return whole;
  const before = whole.x.findIndex((x) => x >= low), after = whole.x.findIndex((x) => x > high);
  const join = (name) => [...whole[name].slice(0, before < 0 ? undefined : before), ...zoomed[name], ...(after < 0 ? [] : whole[name].slice(after))];
  return { x: join("x"), y: join("y") };
}
