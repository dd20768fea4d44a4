// The fields that describe a run, for a new run and for a plan. Only what differs from the preset becomes a setting.
import { h } from "./dom.js";
import * as format from "./format.js";
import { t } from "./i18n.js";

const METHODS = ["lora", "qlora", "full", "pretrain"];
const LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768];
const BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
const RANKS = [4, 8, 16, 32, 64, 128, 256, 320];
const STEPS = [50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000];
const EPOCHS = [1, 2, 3, 4, 5, 6, 8, 10];

// The run that is being thought about, on both pages, until the page is loaded again.
export const planned = { form: { preset: "lora-20k", settings: {}, more: "" }, platform: "", gpu: "", budget: "", deadline: "" };

export class RunForm {
  // form: { preset, settings, more }, changed in place; `changed()` is called after each change.
  constructor(catalogue, form, changed) {
    [this.catalogue, this.form, this.changed] = [catalogue, form, changed];
    this.element = h("div", { class: "form" });
    if (!this.preset()) this.form.preset = catalogue.presets[0]?.name ?? "";
    this.draw();
  }

  preset(name = this.form.preset) {
    return this.catalogue.presets.find((one) => one.name === name);
  }

  usual(key) {
    return this.preset()?.settings?.[key] ?? null;
  }

  value(key) {
    return this.form.settings[key] ?? this.usual(key);
  }

  set(key, value) {
    if (value === "" || value === null || String(value) === String(this.usual(key))) delete this.form.settings[key];
    else this.form.settings[key] = value;
    this.changed();
  }

  // What the server gets: the settings of the fields, then those written by hand.
  asBody() {
    const settings = { ...this.form.settings };
    for (const line of this.form.more.split("\n")) {
      const [key, ...rest] = line.split("=");
      if (key.trim() && rest.length) settings[key.trim()] = rest.join("=").trim();
    }
    return { preset: this.form.preset, settings };
  }

  choosePreset(name) {
    const before = this.preset()?.settings?.["method.kind"];
    this.form.preset = name;
    const kept = before === this.usual("method.kind") ? ["name", "model.base", "data.sources", "limits.budget", "limits.time"] : ["name", "data.sources", "limits.budget", "limits.time"];
    this.form.settings = Object.fromEntries(Object.entries(this.form.settings).filter(([key]) => kept.includes(key)));
    this.draw();
    this.changed();
  }

  draw() {
    const method = this.usual("method.kind");
    const presets = this.catalogue.presets.filter((one) => one.settings?.["method.kind"] === method);
    const first = (kind) => this.catalogue.presets.find((one) => one.settings?.["method.kind"] === kind)?.name;
    const kinds = h("div", { class: "segments", role: "group", "aria-label": t("method") }, ...METHODS.filter(first).map((kind) => h("button", { type: "button", "aria-pressed": String(kind === method), "data-kind": kind, onclick: () => {
      this.choosePreset(first(kind));
      this.element.querySelector(`[data-kind="${kind}"]`).focus();
    } }, t(`method_${kind}`))));
    const preset = h("select", { onchange: () => this.choosePreset(preset.value) }, ...presets.map((one) => h("option", { value: one.name }, one.name)));
    preset.value = this.form.preset;
    this.element.replaceChildren(...[
      field(t("method"), kinds), field(t("preset"), preset, this.preset()?.description),
      method === "pretrain" ? null : this.modelField(),
      this.lengthField(),
      this.slider("data.max_length", t("sequence_length"), LENGTHS, (n) => t("n_tokens", { n: format.count(n) })),
      this.slider("train.global_batch", t("global_batch"), BATCHES, (n) => t("n_rows", { n: format.count(n) })),
      ["lora", "qlora"].includes(method) ? this.slider("method.rank", t("rank"), RANKS, format.count) : null,
    ].filter(Boolean));
  }

  modelField() {
    const list = h("datalist", { id: "models" }, ...this.catalogue.models.map((one) => h("option", { value: one.hub ?? one.name }, `${format.compact(one.parameters)} ${t("parameters")}`)));
    const input = h("input", { value: this.value("model.base") ?? "", spellcheck: false, autocomplete: "off", onchange: () => this.set("model.base", input.value.trim()) });
    input.setAttribute("list", "models");
    return field(t("model"), h("span", {}, input, list), t("model_hint"));
  }

  // By epochs or by steps; a preset has one of them.
  lengthField() {
    const { settings } = this.form;
    const steps = settings["train.steps"] !== undefined || (settings["train.epochs"] === undefined && this.usual("train.steps") !== null);
    const key = steps ? "train.steps" : "train.epochs";
    const unit = h("select", { "aria-label": t("unit"), onchange: () => {
      for (const one of ["train.steps", "train.epochs"]) delete settings[one];
      settings[unit.value] = unit.value === "train.steps" ? 1000 : 1;
      if (String(settings[unit.value]) === String(this.usual(unit.value))) delete settings[unit.value];
      this.draw();
      this.changed();
    } }, h("option", { value: "train.epochs" }, t("epochs")), h("option", { value: "train.steps" }, t("steps")));
    unit.value = key;
    const made = this.slider(key, t("length"), steps ? STEPS : EPOCHS, steps ? format.count : (n) => format.number(n));
    made.querySelector(".value").append(unit);
    return made;
  }

  // A slider over usual values, and a number beside it for any other.
  slider(key, label, stops, shown) {
    const now = Number(this.value(key) ?? stops[0]), place = (n) => stops.reduce((best, stop, i) => (Math.abs(Math.log(stop / n)) < Math.abs(Math.log(stops[best] / n)) ? i : best), 0);
    const id = `f-${key.replaceAll(".", "-")}`;
    const range = h("input", { type: "range", min: 0, max: stops.length - 1, step: 1, value: place(now || stops[0]), "aria-label": label, "aria-valuetext": shown(now), oninput: () => {
      const value = stops[Number(range.value)];
      number.value = value;
      range.setAttribute("aria-valuetext", shown(value));
      this.set(key, value);
    } });
    const number = h("input", { id, type: "number", min: 0, step: "any", value: now, oninput: () => {
      if (!(number.valueAsNumber > 0)) return;
      range.value = place(number.valueAsNumber);
      this.set(key, number.valueAsNumber);
    } });
    return h("div", { class: "field slider" }, h("label", { htmlFor: id }, label), h("div", { class: "value" }, range, number));
  }
}

let fields = 0;

// A label above its control, and a line below.
export function field(label, control, hint) {
  const input = control.matches("input, select, textarea") ? control : control.querySelector("input, select, textarea");
  if (input && !input.id) input.id = `field-${++fields}`;
  const name = input ? h("label", { htmlFor: input.id }, label) : h("span", { class: "label" }, label);
  return h("div", { class: "field" }, name, control, hint ? h("small", { class: "faint" }, hint) : null);
}
