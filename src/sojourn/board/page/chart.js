// A chart: lines over an x axis, as SVG. It asks nobody for data: whoever made it gives data, and hears of zooms and of the cursor.
import { announce, h, svg } from "./dom.js";
import * as format from "./format.js";
import { t } from "./i18n.js";
import { extent, logTicks, nearest, scale, smooth, ticks, timeTicks } from "./scale.js";

const TOP = 10, BOTTOM = 24, RIGHT = 14, LETTER = 6.6;
const NEAR = 7; // pixels between a pointer and what it means
let made = 0;

// Kinds of events: which are worth a line through the chart, and which are a small mark on the axis.
const LINES = { out_of_memory: "warn", spike: "warn", bad_step: "warn", suspect_hardware: "warn", bad_weights: "warn", bad_gradients: "warn", restarted: "edge", start: "edge", stopped: "edge", budget: "limit", limit: "limit", ended_early: "limit", failed: "bad", save_failed: "bad", damaged_checkpoint: "bad", config_changed: "edge" };
const MARKS = new Set(["saved", "best"]);
export const eventClass = (kind) => LINES[kind] ?? (MARKS.has(kind) ? "mark" : "");

// hooks: { zoom(low, high) or zoom(null), cursor(x or null) }
export class Chart {
  // title; value: a number as text; series: [{ id, name, color: 0…5, dashed, exact, x: [], y: [] }], exact: never smoothed; events: [{ x, kind, text }]
  constructor({ title, value = format.number, binary = false, zero = false, height = 210, hooks = {} }) {
    this.title = title;
    this.value = value;
    this.binary = binary; // bytes: ticks are at round numbers of MiB, GiB, …
    this.zero = zero; // the y axis starts there
    this.height = height;
    this.hooks = hooks;
    this.state = { series: [], events: [], axis: "step", currency: "", domain: null, logY: false, smoothing: 0, hidden: new Set() };
    this.clip = `clip-${++made}`;
    this.svg = svg("svg", { class: "plot", height });
    this.tip = h("div", { class: "tip", hidden: true });
    this.element = h("div", { class: "chart", tabIndex: 0, role: "group" }, this.svg, this.tip);
    this.width = 0;
    this.cursor = null;
    this.listen();
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.element);
    this.seen = false; // only what is on the screen is drawn
    this.screen = new IntersectionObserver(([entry]) => {
      this.seen = entry.isIntersecting;
      if (this.seen && this.stale) this.draw();
    }, { rootMargin: "300px" });
    this.screen.observe(this.element);
  }

  destroy() {
    this.observer.disconnect();
    this.screen.disconnect();
  }

  set(changes) {
    Object.assign(this.state, changes);
    this.stale = true;
    if (this.seen) this.draw();
  }

  resize() {
    const width = Math.floor(this.element.clientWidth);
    if (width && width !== this.width) {
      this.width = width;
      this.draw();
    }
  }

  // -- Drawing --

  shown() {
    return this.state.series.filter((one) => one.x.length && !this.state.hidden.has(one.id));
  }

  // All of the x axis that has data, here or in the charts beside it.
  whole() {
    if (this.state.whole) return this.state.whole;
    let low = Infinity, high = -Infinity;
    for (const { x } of this.state.series) if (x.length) [low, high] = [Math.min(low, x[0]), Math.max(high, x.at(-1))];
    return low <= high ? [low, high] : null;
  }

  draw() {
    if (!this.width) return;
    this.stale = false;
    const shown = this.shown(), whole = this.whole();
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.element.setAttribute("aria-label", this.describe(shown));
    if (!whole || !shown.length) {
      this.x = null;
      const text = svg("text", { x: this.width / 2, y: this.height / 2, class: "none", "text-anchor": "middle" }, t("no_values"));
      this.svg.replaceChildren(text);
      this.tip.hidden = true;
      return;
    }
    const domain = widen(this.state.domain ?? whole);
    const lines = shown.map((one) => ({ ...one, smoothed: this.state.smoothing && !one.exact ? smooth(one.x, one.y, this.state.smoothing, whole[1] - whole[0]) : one.y }));
    const range = this.range(lines, domain);
    const log = this.state.logY && range[0] > 0;
    const unit = this.binary ? 1024 ** Math.floor(Math.log2(Math.max(1, range[1])) / 10) : 1;
    const yTicks = (log ? logTicks : ticks)(range[0] / unit, range[1] / unit, 5).map((y) => y * unit);
    const labels = distinct(yTicks, this.value);
    const left = Math.ceil(Math.max(28, ...labels.map((text) => text.length * LETTER + 12)));
    this.x = scale(domain, [left, this.width - RIGHT]);
    this.y = scale(range, [this.height - BOTTOM, TOP], log);
    this.lines = lines;
    this.layer = svg("g", { class: "cursor" });
    this.svg.replaceChildren(this.drawClip(left), this.drawGrid(yTicks, labels, left, domain), this.drawEvents(left), this.drawLines(log), this.layer);
    this.drawCursor();
  }

  range(lines, [low, high]) {
    const log = this.state.logY;
    let least = Infinity, most = -Infinity;
    for (const { x, y } of lines) {
      const found = extent(x, y, low, high, log) ?? extent(x, y, -Infinity, Infinity, log); // between two points, and nothing there
      if (found) [least, most] = [Math.min(least, found[0]), Math.max(most, found[1])];
    }
    if (this.zero && !log && least > 0) least = 0;
    if (least > most) return log ? this.rangeWithoutLog(lines, low, high) : [0, 1];
    if (log) return least === most ? [least / 2, most * 2] : [least / (most / least) ** 0.04, most * (most / least) ** 0.04];
    if (least === most) return least === 0 ? [-1, 1] : [least - Math.abs(least) * 0.1, most + Math.abs(most) * 0.1];
    const margin = (most - least) * 0.05;
    return [least >= 0 && least < margin ? 0 : least - margin, most + margin];
  }

  rangeWithoutLog(lines, low, high) {
    this.state.logY = false;
    const found = this.range(lines, [low, high]);
    this.state.logY = true;
    return [Math.min(found[0], 0), found[1]]; // what is zero or below has no logarithm: drawn on a linear axis
  }

  drawClip(left) {
    const box = svg("rect", { x: left - 4, y: TOP - 4, width: Math.max(0, this.width - RIGHT - left) + 8, height: this.height - BOTTOM - TOP + 8 });
    return svg("clipPath", { id: this.clip }, box);
  }

  drawGrid(yTicks, labels, left, domain) {
    const group = svg("g", { class: "grid" }), right = this.width - RIGHT, bottom = this.height - BOTTOM;
    yTicks.forEach((value, i) => {
      const y = Math.round(this.y(value)) + 0.5;
      group.append(svg("line", { x1: left, x2: right, y1: y, y2: y }), svg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, labels[i]));
    });
    const wanted = Math.max(2, Math.floor((right - left) / 90));
    const xTicks = (this.state.axis === "time" ? timeTicks : ticks)(...domain, wanted).filter((value) => this.state.axis !== "step" || Number.isInteger(value));
    let last = -Infinity;
    for (const value of xTicks) {
      const text = this.xText(value, 3), half = (text.length * LETTER) / 2, x = this.x(value);
      if (x - half < last + 8 || x - half < 0) continue;
      last = x + half;
      const anchor = last > this.width ? "end" : "middle";
      group.append(svg("text", { x: anchor === "end" ? this.width - 2 : x, y: this.height - 6, "text-anchor": anchor }, text));
    }
    group.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom + 0.5, y2: bottom + 0.5 }));
    return group;
  }

  xText(value) {
    return this.state.axis === "step" ? (Math.abs(value) >= 1e5 ? format.compact(value, 4) : format.count(value)) : format.position(value, this.state.axis, this.state.currency);
  }

  drawLines(log) {
    const group = svg("g", { class: "lines", "clip-path": `url(#${this.clip})` });
    for (const raw of [true, false]) {
      for (const one of this.lines) {
        const dashed = one.dashed ? " dashed" : "";
        if (raw && one.smoothed === one.y) continue;
        const values = raw ? one.y : one.smoothed;
        group.append(svg("path", { class: `line c${one.color}${dashed}${raw ? " raw" : ""}`, d: this.path(one.x, values, log) }));
        if (!raw) group.append(...this.drawSingles(one, values, log));
      }
    }
    return group;
  }

  path(xs, ys, log) {
    const { x: placeX, y: placeY } = this;
    let d = "", pen = "M";
    for (let i = 0; i < xs.length; i++) {
      const y = ys[i];
      if (y === null || !Number.isFinite(y) || (log && y <= 0)) {
        pen = "M";
        continue;
      }
      d += pen + Math.round(placeX(xs[i]) * 10) / 10 + " " + Math.round(placeY(y) * 10) / 10;
      pen = "L";
    }
    return d;
  }

  // A point with nothing on either side, which no line shows.
  drawSingles(one, ys, log) {
    const there = (i) => ys[i] !== null && ys[i] !== undefined && Number.isFinite(ys[i]) && !(log && ys[i] <= 0);
    const alone = one.x.length <= 40 && one.dashed ? one.x.map((_, i) => i) : one.x.map((_, i) => i).filter((i) => !there(i - 1) && !there(i + 1));
    return alone.filter(there).map((i) => svg("circle", { class: `dot c${one.color}`, cx: this.x(one.x[i]).toFixed(1), cy: this.y(ys[i]).toFixed(1), r: 2.5 }));
  }

  drawEvents(left) {
    const group = svg("g", { class: "events", "clip-path": `url(#${this.clip})` }), bottom = this.height - BOTTOM;
    let last = -Infinity;
    for (const event of this.state.events) {
      const kind = eventClass(event.kind), x = Math.round(this.x(event.x)) + 0.5;
      if (!kind || x < left - 1 || x > this.width - RIGHT + 1) continue;
      if (kind === "mark") {
        if (x - last < 5) continue;
        last = x;
        group.append(svg("path", { class: `event ${event.kind === "best" ? "best" : "mark"}`, d: `M${x} ${bottom - 5}l3.5 5h-7z` }));
      } else group.append(svg("line", { class: `event ${kind}`, x1: x, x2: x, y1: TOP, y2: bottom }), svg("circle", { class: `event ${kind}`, cx: x, cy: TOP, r: 3 }));
    }
    return group;
  }

  // -- The cursor --

  // x: a value on the x axis, or null. `own`: this chart is pointed at, and shows the values.
  setCursor(x, own = false) {
    this.cursor = x === null ? null : { x, own };
    if (this.x) this.drawCursor();
  }

  drawCursor() {
    const { cursor } = this;
    this.layer?.replaceChildren();
    this.tip.hidden = true;
    if (!cursor) return;
    const found = this.lines.map((one) => ({ one, i: nearest(one.x, cursor.x) })).filter(({ i }) => i >= 0);
    const at = found.length && cursor.own ? closest(found, cursor.x) : cursor.x, x = this.x(at);
    if (x < this.x.left || x > this.width) return;
    this.layer.append(svg("line", { class: "cross", x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM }));
    const values = [];
    for (const { one, i } of found) {
      const y = one.smoothed[i], near = Math.abs(this.x(one.x[i]) - x) < Math.max(NEAR, ((this.width - 40) / one.x.length) * 1.5);
      if (y === null || !Number.isFinite(y) || !near) continue;
      const py = this.y(y);
      if (Number.isFinite(py)) this.layer.append(svg("circle", { class: `dot c${one.color}`, cx: this.x(one.x[i]), cy: py, r: 3.5 }));
      values.push({ one, y, raw: one.y[i] });
    }
    if (cursor.own) this.showTip(at, x, values);
  }

  showTip(at, x, values) {
    const rows = values.map(({ one, y, raw }) => h("div", { class: "tip-row" }, h("i", { class: `swatch c${one.color}${one.dashed ? " dashed" : ""}` }),
      h("span", {}, one.name), h("b", {}, this.value(y, 5)), y !== raw && h("small", {}, this.value(raw, 5))));
    const events = this.state.events.filter((event) => eventClass(event.kind) && Math.abs(this.x(event.x) - x) < NEAR).slice(0, 4);
    const notes = events.map((event) => h("div", { class: `tip-event ${eventClass(event.kind)}` }, event.text));
    const head = h("div", { class: "tip-head" }, `${t(`axis_${this.state.axis}`)} ${this.xText(at)}`);
    this.tip.replaceChildren(head, ...rows, ...notes);
    this.tip.hidden = false;
    const width = this.tip.offsetWidth, onRight = x + 14 + width <= this.width;
    this.tip.style.left = `${onRight ? x + 14 : Math.max(0, x - 14 - width)}px`;
    this.tip.style.top = `${TOP}px`;
  }

  // -- Pointer and keyboard --

  listen() {
    let start = null;
    const box = svg("rect", { class: "selection" });
    const pixel = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    this.element.addEventListener("pointerdown", (event) => {
      if (!this.x || event.button || event.pointerType === "touch") return;
      start = pixel(event);
      this.element.setPointerCapture(event.pointerId);
    });
    this.element.addEventListener("pointermove", (event) => {
      if (!this.x) return;
      const now = pixel(event);
      this.point(this.x.invert(now));
      if (start === null) return;
      for (const [name, value] of Object.entries({ x: Math.min(start, now), y: TOP, width: Math.abs(now - start), height: this.height - TOP - BOTTOM })) box.setAttribute(name, value);
      this.svg.append(box);
    });
    const end = (event) => {
      const from = start;
      start = null;
      box.remove();
      if (from === null || !this.x || event.type === "pointercancel") return;
      const to = pixel(event);
      if (Math.abs(to - from) > 5) this.zoom(this.x.invert(Math.min(from, to)), this.x.invert(Math.max(from, to)));
    };
    this.element.addEventListener("pointerup", end);
    this.element.addEventListener("pointercancel", end);
    this.element.addEventListener("pointerleave", () => this.point(null));
    this.element.addEventListener("blur", () => this.point(null));
    this.element.addEventListener("dblclick", () => this.hooks.zoom?.(null));
    this.element.addEventListener("wheel", (event) => {
      const mine = event.ctrlKey || event.metaKey || document.activeElement === this.element; // otherwise the page is scrolled
      if (!this.x || !mine || !event.deltaY) return;
      event.preventDefault();
      this.zoomBy(event.deltaY > 0 ? 1.25 : 0.8, this.x.invert(pixel(event)));
    }, { passive: false });
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  point(x) {
    this.setCursor(x, x !== null);
    this.hooks.cursor?.(x, this);
  }

  domain() {
    return widen(this.state.domain ?? this.whole() ?? [0, 1]);
  }

  zoomBy(factor, around) {
    const [low, high] = this.domain(), at = around ?? (low + high) / 2;
    this.zoom(at - (at - low) * factor, at + (high - at) * factor);
  }

  // Never beyond the data; all of it is no zoom.
  zoom(low, high) {
    const whole = this.whole();
    if (!whole) return;
    [low, high] = [Math.max(low, whole[0]), Math.min(high, Math.max(whole[1], this.state.end ?? -Infinity))];
    const span = whole[1] - whole[0];
    if (high - low < span * 1e-5 || (this.state.axis === "step" && high - low < 1)) return;
    this.state.domain = high - low > span * 0.999 ? null : [low, high]; // the next key may come before it is drawn
    this.hooks.zoom?.(...(this.state.domain ?? [null]));
  }

  key(event) {
    if (!this.x || event.altKey || event.ctrlKey || event.metaKey) return;
    const [low, high] = this.domain(), moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in moves && event.shiftKey) {
      const by = (high - low) * 0.25 * moves[event.key], whole = this.whole();
      const moved = by < 0 ? Math.max(by, whole[0] - low) : Math.min(by, whole[1] - high);
      this.zoom(low + moved, high + moved);
    } else if (event.key in moves) this.step(moves[event.key]);
    else if (event.key === "Home") this.step(-Infinity);
    else if (event.key === "End") this.step(Infinity);
    else if (event.key === "+" || event.key === "=") this.zoomBy(0.6, this.cursor?.x);
    else if (event.key === "-") this.zoomBy(1 / 0.6, this.cursor?.x);
    else if (event.key === "0" || event.key === "Escape") this.hooks.zoom?.(null);
    else return;
    event.preventDefault();
  }

  // To the next point that is seen, and says it.
  step(by) {
    const one = this.lines[0], [low, high] = this.domain();
    const from = nearest(one.x, low), to = nearest(one.x, high), now = this.cursor ? nearest(one.x, this.cursor.x) : by > 0 ? from - 1 : to + 1;
    const i = Math.min(to, Math.max(from, now + by));
    if (i < 0) return;
    this.point(one.x[i]);
    const values = this.lines.map((line) => `${line.name} ${this.value(line.smoothed[nearest(line.x, one.x[i])], 5)}`);
    announce(`${t(`axis_${this.state.axis}`)} ${this.xText(one.x[i])}${t("colon")}${values.join(t("comma"))}`);
  }

  describe(shown) {
    const parts = shown.map((one) => {
      const last = one.y.findLast((y) => y !== null && Number.isFinite(y)), found = extent(one.x, one.y, -Infinity, Infinity);
      return found ? t("chart_series", { name: one.name, last: this.value(last, 5), low: this.value(found[0], 5), high: this.value(found[1], 5) }) : "";
    });
    return `${this.title}. ${parts.join(" ")} ${t("chart_keys")}`;
  }
}

function widen([low, high]) {
  return low < high ? [low, high] : [low - 1, high + 1];
}

// With as many digits as tell them apart.
function distinct(values, text) {
  for (let digits = 3; ; digits++) {
    const labels = values.map((value) => text(value, digits));
    if (digits === 7 || new Set(labels).size === labels.length) return labels;
  }
}

function closest(found, x) {
  const xs = found.map(({ one, i }) => one.x[i]);
  return xs.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best));
}
