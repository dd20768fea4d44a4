// A plan: what a run needs, and what each card and platform would take for it.
import { get, latest, post } from "./api.js";
import { copyButton, h, icon } from "./dom.js";
import * as format from "./format.js";
import { t } from "./i18n.js";
import { memoryBar, memoryLegend, partsOf } from "./memory_bar.js";
import { cost, offerName, offersTable, scatter, time } from "./offers.js";
import { field, planned as state, RunForm } from "./run_form.js";

export function showPlan(root) {
  const side = h("section", { class: "form-side", "aria-label": t("the_run") }), result = h("section", { class: "plan-result", "aria-live": "off" }), error = h("p", { class: "error", role: "alert", hidden: true });
  root.append(h("header", { class: "page-head" }, h("h1", {}, t("nav_plan")), h("a", { class: "button", href: "#/new" }, icon("play"), t("start_this")), h("p", { class: "faint" }, t("plan_text"))), h("div", { class: "split" }, side, h("div", { class: "main-side" }, error, result)));
  result.append(h("p", { class: "empty" }, t("planning")));
  let left = false, form;
  const refresh = latest(() => {
    result.classList.add("old");
    return post("/api/plan", planBody(form, state));
  }, (plan) => {
    if (left) return;
    result.classList.remove("old");
    error.hidden = true;
    drawPlan(result, plan, refresh);
  }, (failure) => Object.assign(error, { hidden: false, textContent: failure.message || t("board_gone_short") }));
  get("/api/catalog").then((catalogue) => {
    if (left) return;
    form = new RunForm(catalogue, state.form, refresh);
    side.append(form.element, h("div", { class: "form" }, ...limitFields(catalogue, refresh)));
    refresh();
  }, (failure) => Object.assign(error, { hidden: false, textContent: failure.message || t("board_gone_short") }));
  return () => (left = true);
}

export function planBody(form, { gpu, platform, budget, deadline }) {
  return { ...form.asBody(), gpu: gpu ? [gpu] : [], platform: platform || null, budget: budget || null, deadline: deadline || null };
}

function limitFields(catalogue, refresh) {
  const text = (name, label, placeholder) => {
    const input = h("input", { value: state[name], placeholder, autocomplete: "off", oninput: () => ((state[name] = input.value.trim()), refresh()) });
    return field(label, input);
  };
  const choice = (name, label, all, none) => {
    const select = h("select", { onchange: () => ((state[name] = select.value), refresh()) }, h("option", { value: "" }, none), ...all.map((one) => h("option", { value: one }, one)));
    select.value = state[name];
    return field(label, select);
  };
  return [text("budget", t("budget"), "¥30, $5"), text("deadline", t("deadline"), "12h, 3d"), choice("platform", t("platform"), catalogue.platforms.map(nameOf), t("any_platform")), choice("gpu", t("card"), catalogue.gpus.map(nameOf), t("any_card"))];
}

const nameOf = (one) => (typeof one === "string" ? one : one.name);

// In yuan, as the plan compares offers; what is in another currency is left to the server.
function limits() {
  const amount = /^[¥￥]?\s*(\d+(?:\.\d+)?)\s*$/.exec(state.budget), hours = /^(\d+(?:\.\d+)?)\s*(h|d|m)$/.exec(state.deadline);
  return { budget: amount ? Number(amount[1]) : null, hours: hours ? Number(hours[1]) * { h: 1, d: 24, m: 1 / 60 }[hours[2]] : null };
}

function drawPlan(result, plan, refresh) {
  const parts = partsOf(plan.memory.by_kind, plan.memory.allocated, plan.memory.device);
  const fitting = plan.offers.find((one) => one.fits && one.device === plan.memory.device) ?? plan.best;
  const usable = fitting ? (fitting.gpu.usable_gib ?? fitting.gpu.memory_gib) : null;
  const notes = [plan.assumed, plan.assumed_vocabulary, ...(plan.data_notes ?? []), ...(plan.notes ?? [])].filter(Boolean);
  result.replaceChildren(
    planFigures(plan),
    ...notes.map((note) => h("p", { class: "note" }, note)),
    h("h2", {}, fitting ? t("memory_on", { card: offerName(fitting) }) : t("memory")), memoryBar(parts, usable), memoryLegend(parts),
    h("h2", {}, t("cost_against_time")), scatter(plan, limits(), result.clientWidth),
    h("h2", {}, t("offers")), offersTable(plan, state.gpu, (name) => ((state.gpu = state.gpu === name ? "" : name), refresh())),
    plan.advice.length ? h("div", {}, h("h2", {}, t("advice")), h("ul", {}, ...plan.advice.map((one) => h("li", {}, `${one.gpu}${t("colon")}${one.changes.join(t("comma"))}`, " ", h("code", {}, [].concat(one.arguments).join(" ")))))) : "",
    h("div", { class: "command" }, h("code", {}, plan.line), copyButton(() => plan.line)));
}

// The figures that one compares while moving a slider.
export function planFigures(plan) {
  const fits = plan.offers.filter((one) => one.fits), hours = fits.map((one) => one.hours).filter(Number.isFinite), paid = fits.filter((one) => one.bill);
  const range = (values, text) => (!values.length ? format.NONE : text(Math.min(...values)) === text(Math.max(...values)) ? text(values[0]) : `${text(Math.min(...values))} – ${text(Math.max(...values))}`);
  const figures = [
    [t("model"), `${format.compact(plan.parameters)}`, plan.model.name],
    [t("length"), t("n_steps", { n: format.count(plan.steps) }), t("n_tokens", { n: format.compact(plan.tokens) })],
    [t("memory"), `${format.gib(plan.memory.device)} GiB`, t("at_peak")],
    [t("time"), plan.best ? time(plan.best) : format.NONE, range(hours, format.hours)],
    [t("column_money"), plan.best ? cost(plan.best) : format.NONE, range(paid.map((one) => one.bill.cny), (value) => format.money(value, "CNY"))],
    [t("cheapest"), plan.best ? offerName(plan.best) : t("nothing_fits"), plan.best ? (plan.best.bill?.title ?? "") : ""],
  ];
  return h("dl", { class: "facts" }, ...figures.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, more)))));
}
