// The offers of a plan: cost against hours, and a table.
import { h, svg } from "./dom.js";
import * as format from "./format.js";
import { t } from "./i18n.js";
import { memoryBar, partsOf } from "./memory_bar.js";
import { hourTicks, scale, ticks } from "./scale.js";

const HEIGHT = 300, LEFT = 58, RIGHT = 16, TOP = 14, BOTTOM = 34;
export const offerName = (offer) => `${offer.count > 1 ? `${offer.count} × ` : ""}${offer.gpu.name}`;
export const same = (one, other) => Boolean(one && other && one.gpu.name === other.gpu.name && one.count === other.count && one.platform === other.platform);
export const cost = (offer) => (offer.bill ? format.between(offer.bill.low.amount, offer.bill.high.amount, (value) => format.money(value, offer.bill.currency)) : t("no_price"));
export const time = (offer) => (offer.low ? format.between(offer.low.hours, offer.high.hours, format.hours) : format.hours(offer.hours));
const place = (offer) => offer.bill?.title ?? offer.platform ?? t("no_platform");

// Hours across, money up; what meets budget and deadline is full, the cheapest of it is named.
export function scatter(plan, { budget, hours }, room) {
  const offers = plan.offers.filter((one) => one.fits && one.hours && one.bill), width = Math.max(300, Math.min(880, room));
  if (!offers.length) return h("p", { class: "empty" }, t("no_offers"));
  const all = offers.map((one) => one.hours), amounts = offers.map((one) => one.bill.cny);
  const domain = [Math.min(...all) / 1.3, Math.max(...all, hours ?? 0) * 1.3], most = Math.max(...amounts, Math.min(budget ?? 0, 4 * Math.max(...amounts)), 0.01) * 1.12;
  const x = scale(domain, [LEFT, width - RIGHT], true), y = scale([0, most], [HEIGHT - BOTTOM, TOP]);
  const drawing = svg("svg", { class: "scatter", width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": t("scatter_label", { n: offers.length }) });
  const grid = svg("g", { class: "grid" });
  for (const value of ticks(0, most, 5)) grid.append(svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }), svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, format.money(value, "CNY").replace(/\.00$/, "")));
  for (const value of hourTicks(...domain, width / 80)) grid.append(svg("text", { x: x(value), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, format.hours(value)));
  grid.append(svg("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
  drawing.append(grid);
  const limit = (at, line, text) => drawing.append(svg("line", { class: "limit", ...line }), svg("text", { class: "limit", ...at }, text));
  if (budget && budget <= most) limit({ x: width - RIGHT, y: y(budget) - 5, "text-anchor": "end" }, { x1: LEFT, x2: width - RIGHT, y1: y(budget), y2: y(budget) }, t("budget"));
  if (hours && hours <= domain[1]) limit({ x: x(hours) - 5, y: TOP + 8, "text-anchor": "end" }, { x1: x(hours), x2: x(hours), y1: TOP, y2: HEIGHT - BOTTOM }, t("deadline"));
  const meets = (one) => (!budget || one.bill.high.cny <= budget) && (!hours || one.bill.high.elapsed <= hours);
  const marked = offers.filter((one) => same(one, plan.best));
  for (const one of offers) {
    const text = `${offerName(one)}${t("comma")}${place(one)}${t("colon")}${time(one)}${t("comma")}${cost(one)}`;
    const kind = same(one, plan.best) ? "best" : same(one, plan.fastest) ? "fastest" : meets(one) ? "meets" : "misses";
    drawing.append(svg("circle", { class: `offer ${kind}`, cx: x(one.hours), cy: y(one.bill.cny), r: kind === "best" ? 7 : 5, tabindex: 0, role: "img", "aria-label": text }, svg("title", {}, text)));
  }
  const points = offers.map((one) => [x(one.hours), y(one.bill.cny)]);
  for (const one of marked.slice(0, 1)) drawing.append(...bestLabel(x(one.hours), y(one.bill.cny), `${t("cheapest")}${t("colon")}${offerName(one)}${t("comma")}${cost(one)}`, points, width));
  return h("div", { class: "scatter-box" }, drawing, h("small", { class: "faint" }, t("scatter_axes")));
}

// Beside its point, or above it, where no other point is.
function bestLabel(cx, cy, text, points, width) {
  const long = [...text].reduce((sum, letter) => sum + (letter > "\u2e7f" ? 12 : 7), 0);
  const free = (left, base) => !points.some(([px, py]) => px > left - 8 && px < left + long + 8 && py > base - 19 && py < base + 11);
  const lowest = (left) => { let base = Math.max(TOP + 10, cy - 9); while (base > TOP + 10 && !free(left, base)) base = Math.max(TOP + 10, base - 3); return base; };
  const sides = [cx + 12, cx - 12 - long].filter((left) => left >= LEFT && left + long <= width - RIGHT);
  const places = (sides.length ? sides : [Math.min(Math.max(LEFT, cx - long / 2), width - RIGHT - long)]).map((left) => ({ left, base: lowest(left) }));
  const { left, base } = places.reduce((one, other) => (other.base > one.base ? other : one));
  const label = svg("text", { class: "best", x: left > cx ? left : left + long, y: base, "text-anchor": left > cx ? "start" : "end" }, text);
  return base < cy - 30 ? [svg("line", { class: "best", x1: cx, x2: left > cx ? left : Math.min(cx, left + long), y1: cy - 9, y2: base + 4 }), label] : [label];
}

export function offersTable(plan, chosen, choose) {
  const shown = plan.offers.filter((one) => one.fits || one.device);
  const heads = ["card", "platform", "memory", "micro_batch", "column_speed", "time", "column_money"].map((name) => h("th", { scope: "col", class: `o-${name}` }, t(name)));
  const rows = shown.map((one) => drawOffer(plan, one, chosen, choose));
  const none = plan.offers.filter((one) => !one.fits);
  const left = none.length ? h("details", { class: "left-out" }, h("summary", {}, t("cards_left_out", { n: none.length })), h("ul", {}, ...none.map((one) => h("li", {}, h("b", {}, offerName(one)), ` ${one.reason_not}`)))) : null;
  return h("div", {}, h("div", { class: "scroll" }, h("table", { class: "offers" }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows))), left);
}

function drawOffer(plan, one, chosen, choose) {
  const marks = [same(one, plan.best) && h("span", { class: "tag good" }, t("cheapest")), same(one, plan.fastest) && h("span", { class: "tag" }, t("fastest"))].filter(Boolean);
  const parts = one.device ? partsOf(one.by_kind ?? {}, one.allocated, one.device) : [];
  const name = choose ? h("button", { type: "button", class: "link", "aria-pressed": String(chosen === one.gpu.name), onclick: () => choose(one.gpu.name) }, offerName(one)) : h("b", {}, offerName(one));
  const usable = one.gpu.usable_gib ?? one.gpu.memory_gib;
  return h("tr", { class: one.fits ? "" : "misses" },
    h("td", { class: "o-card" }, name, " ", ...marks), h("td", { class: "o-platform" }, place(one), one.bill?.high.sessions > 1 ? h("small", {}, ` ${t("sessions", { n: format.between(one.bill.low.sessions, one.bill.high.sessions, String) })}`) : null),
    h("td", { class: "o-memory" }, parts.length ? memoryBar(parts, usable) : "", h("small", {}, `${format.gib(one.device)} / ${format.number(usable, 3)} GiB`)),
    h("td", { class: "number o-micro_batch" }, format.count(one.micro_batch)), h("td", { class: "number o-column_speed" }, format.compact(one.tokens_per_second)),
    h("td", { class: "number nowrap", title: one.range_reason }, time(one)), h("td", { class: "number nowrap" }, h("b", {}, cost(one))));
}
