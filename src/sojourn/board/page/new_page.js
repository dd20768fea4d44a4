// A new run: the form, the data as the model will see it, the plan beside it, and the ways to start.
import { get, latest, post, upload } from "./api.js";
import { ask } from "./dialog.js";
import { copyButton, download, h, icon } from "./dom.js";
import { drawExample } from "./examples.js";
import * as format from "./format.js";
import { t } from "./i18n.js";
import { memoryBar, memoryLegend, partsOf } from "./memory_bar.js";
import { cost, offerName, time } from "./offers.js";
import { planBody, planFigures } from "./plan_page.js";
import { field, planned as state, RunForm } from "./run_form.js";
import { openTask } from "./tasks.js";

export function showNew(root) {
  const page = new NewPage(root);
  return () => (page.left = true);
}

class NewPage {
  constructor(root) {
    this.side = h("section", { class: "form-side", "aria-label": t("the_run") });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.plan = h("section", { class: "card plan-card", "aria-label": t("nav_plan") }, h("p", { class: "empty" }, t("planning")));
    this.preview = h("section", { class: "card", "aria-label": t("nav_data") });
    this.lines = h("section", { class: "card", "aria-label": t("command") });
    this.start = h("div", { class: "group start" });
    root.append(h("header", { class: "page-head" }, h("h1", {}, t("nav_new"))), h("div", { class: "split" }, this.side, h("div", { class: "main-side" }, this.error, this.plan, this.preview, this.lines)));
    this.askPlan = latest(() => (this.plan.classList.add("old"), post("/api/plan", planBody(this.form, state))), (plan) => this.drawPlan(plan), (error) => this.drawNoPlan(error));
    this.askForm = latest(() => this.describe(this.body()), (found) => this.drawLines(found), (error) => this.fail(error));
    this.askPreview = latest(() => {
      if (!this.sources().length) return null;
      this.preview.classList.add("old");
      return post("/api/preview", this.form.asBody());
    }, (found) => this.drawPreview(found), (error) => this.drawPreview({ error: error.message }), 400);
    get("/api/catalog").then((catalogue) => this.left || this.setUp(catalogue), (error) => this.fail(error));
  }

  fail(error) {
    Object.assign(this.error, { hidden: false, textContent: error.message || t("board_gone_short") });
  }

  body() {
    const form = this.form.asBody(), { budget, deadline } = state;
    if (this.host.value) return { ...form, host: this.host.value, ...(budget && { budget }), ...(deadline && { deadline }) };
    return { ...form, settings: { ...form.settings, ...(budget && { "limits.budget": budget }), ...(deadline && { "limits.time": deadline }) } };
  }

  // With the line that the button would start.
  async describe(body) {
    const found = await post("/api/form", body);
    return found.errors.length ? found : { ...found, ...(await post("/api/start", { ...body, preview: true })) };
  }

  sources() {
    return [].concat(this.form.value("data.sources") ?? []).filter(Boolean);
  }

  setUp(catalogue) {
    this.form = new RunForm(catalogue, state.form, () => this.changed());
    this.host = h("select", { onchange: () => this.changed() }, h("option", { value: "" }, t("this_machine")), ...catalogue.hosts.map((one) => h("option", { value: one.name ?? one }, one.name ?? one)));
    const card = h("select", { onchange: () => ((state.gpu = card.value), this.changed()) }, h("option", { value: "" }, t("any_card")), ...catalogue.gpus.map(({ name, memory }) => h("option", { value: name }, `${name} · ${format.number(memory, 3)} GB`)));
    card.value = state.gpu;
    const text = (key, placeholder) => {
      const input = h("input", { value: this.form.value(key) ?? "", placeholder, autocomplete: "off", spellcheck: false, oninput: () => this.form.set(key, input.value.trim()) });
      return input;
    };
    const more = h("textarea", { rows: 2, class: "mono", spellcheck: false, value: state.form.more, placeholder: "train.lr=2e-4\nsave.every=10m", oninput: () => ((state.form.more = more.value), this.changed()) });
    const limit = (name, placeholder) => {
      const input = h("input", { value: state[name], placeholder, autocomplete: "off", oninput: () => ((state[name] = input.value.trim()), this.changed()) });
      return input;
    };
    this.side.append(this.form.element, h("div", { class: "form" },
      this.dataField(catalogue), field(t("run_name"), text("name", t("chosen_for_you"))),
      h("div", { class: "pair" }, field(t("card"), card), field(t("where"), this.host)),
      h("div", { class: "pair" }, field(t("budget"), limit("budget", "¥30, $5")), field(t("deadline"), limit("deadline", "12h, 3d"))),
      field(t("more_settings"), more, t("more_settings_hint")), this.start));
    this.changed();
    this.askPreview();
  }

  dataField(catalogue) {
    const list = h("datalist", { id: "data-sets" }, ...catalogue.data_sets.map(({ name, description }) => h("option", { value: name }, description)));
    const input = h("input", { value: this.sources().join(", "), autocomplete: "off", spellcheck: false, placeholder: "chats.jsonl", onchange: () => this.setData(input.value) });
    input.setAttribute("list", "data-sets");
    const file = h("input", { type: "file", id: "data-file", class: "hidden", accept: ".jsonl,.json,.csv,.tsv,.txt,.md,.parquet,.gz,.zst", onchange: async () => {
      const chosen = file.files[0];
      if (!chosen) return;
      this.preview.replaceChildren(h("p", { class: "empty" }, t("uploading", { name: chosen.name, size: format.bytes(chosen.size) })));
      try {
        input.value = (await upload(chosen)).path;
        this.setData(input.value);
      } catch (error) {
        this.drawPreview({ error: error.message || t("board_gone_short") });
      }
      file.value = "";
    } });
    const button = h("label", { class: "button", htmlFor: "data-file" }, icon("open"), t("upload"));
    const box = h("div", { class: "upload" }, input, list, file, button);
    box.addEventListener("dragover", (event) => event.preventDefault());
    box.addEventListener("drop", (event) => {
      event.preventDefault();
      file.files = event.dataTransfer.files;
      file.dispatchEvent(new Event("change"));
    });
    return field(t("nav_data"), box, t("data_hint"));
  }

  setData(text) {
    const all = text.split(",").map((one) => one.trim()).filter(Boolean);
    this.form.set("data.sources", all.length > 1 ? all : (all[0] ?? ""));
    this.askPreview();
  }

  changed() {
    this.askPlan();
    this.askForm();
  }

  // -- What the server says --

  drawPlan(plan) {
    this.plan.classList.remove("old");
    const one = state.gpu ? plan.offers.find((offer) => offer.device) : plan.best, usable = one ? (one.gpu.usable_gib ?? one.gpu.memory_gib) : null;
    const parts = partsOf(plan.memory.by_kind, plan.memory.allocated, plan.memory.device);
    const notes = [plan.assumed, ...(plan.data_notes ?? []), ...(plan.notes ?? [])].filter(Boolean);
    const cheap = plan.offers.filter((offer) => offer.fits && offer.bill).slice(0, 4);
    this.plan.replaceChildren(planFigures(plan), h("h2", { class: "small" }, one ? t("memory_on", { card: offerName(one) }) : t("memory")), memoryBar(parts, usable), memoryLegend(parts),
      cheap.length ? h("ul", { class: "cheap" }, ...cheap.map((offer) => h("li", {}, h("b", {}, offerName(offer)), ` ${offer.bill.title} `, h("span", {}, `${time(offer)} · ${cost(offer)}`)))) : h("p", { class: "note" }, t("nothing_fits")),
      ...notes.map((note) => h("p", { class: "note" }, note)), h("a", { href: "#/plan" }, t("all_offers")));
  }

  drawNoPlan(error) {
    this.plan.classList.remove("old");
    this.plan.replaceChildren(h("p", { class: "error" }, error.message || t("board_gone_short")));
  }

  drawLines(found) {
    const [problem] = found.errors ?? [];
    Object.assign(this.error, { hidden: !problem, textContent: problem ?? "" });
    const code = (title, text, more) => h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, title), h("span", { class: "group" }, more, copyButton(() => text))), h("pre", { tabIndex: 0 }, h("code", {}, text)));
    const save = h("button", { type: "button", class: "quiet", onclick: () => download(`${found.name ?? "run"}.yaml`, "text/yaml", found.yaml) }, icon("save"), t("save"));
    this.lines.replaceChildren(code(t("command"), found.line), found.yaml ? code("run.yaml", found.yaml, save) : "", ...(found.notes ?? []).map((note) => h("p", { class: "note" }, note)));
    const host = this.host.value, button = h("button", { type: "button", id: "start", class: "primary", disabled: Boolean(problem), onclick: () => this.askStart(host) }, icon("play"), host ? t("start_on", { host }) : t("start_here"));
    this.start.replaceChildren(button);
  }

  askStart(host) {
    const body = this.body();
    ask({
      title: host ? t("ask_start_on", { host }) : t("ask_start"), text: host ? t("ask_start_on_text") : t("ask_start_text"), button: host ? t("start_on", { host }) : t("start_here"),
      preview: async () => (await post("/api/start", { ...body, preview: true })).line,
      act: async () => {
        const { task } = await post("/api/start", body);
        return () => {
          openTask(task.id);
          location.hash = "#/runs";
        };
      },
    });
  }

  drawPreview(found) {
    this.preview.classList.remove("old");
    if (!found) return this.preview.replaceChildren(h("p", { class: "empty" }, t("no_data_yet")));
    if (found.error) return this.preview.replaceChildren(h("h2", { class: "small" }, t("nav_data")), h("p", { class: "error" }, found.error));
    const formats = (found.formats ?? []).map(([name, kind]) => h("p", {}, h("code", {}, name), ` ${kind}`));
    this.preview.replaceChildren(h("h2", { class: "small" }, t("data_seen")), ...formats, found.examples.some(({ spans }) => spans) ? h("p", { class: "faint" }, t("mask_legend")) : "", ...found.examples.map(drawExample), ...(found.notes ?? []).map((note) => h("p", { class: "note" }, note)));
  }
}
