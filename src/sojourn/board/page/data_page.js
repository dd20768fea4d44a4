// Prepared data: the list, and of each the report, a histogram of lengths, and rows with their mask.
import { get, latest } from "./api.js";
import { h, icon } from "./dom.js";
import { drawParts } from "./examples.js";
import * as format from "./format.js";
import { t } from "./i18n.js";
import { commandLine } from "./runs_page.js";

const ROWS = 10;
const path = (name, rest = "") => `/api/data/${encodeURIComponent(name)}${rest}`;
const failed = (error) => h("p", { class: "error", role: "alert" }, error.message || t("board_gone_short"));

export function showData(root) {
  const list = h("div", {}, h("p", { class: "empty" }, t("loading")));
  root.append(h("header", { class: "page-head" }, h("h1", {}, t("nav_data"))), list);
  get("/api/data").then(({ artefacts }) => list.replaceChildren(artefacts.length ? drawList(artefacts) : drawNone()), (error) => list.replaceChildren(failed(error)));
}

function drawNone() {
  return h("div", { class: "empty" }, h("h2", {}, t("no_data")), h("p", {}, t("no_data_text")), commandLine("sojourn prepare lora-20k data.sources=chats.jsonl"));
}

function drawList(artefacts) {
  const heads = ["sources", "documents", "tokens", "rows", "size", "prepared_at"].map((name) => h("th", { scope: "col", class: name === "sources" ? "" : "number" }, t(name)));
  const rows = artefacts.map((one) => h("tr", {},
    h("td", {}, h("a", { class: "run-name", href: `#/data/${encodeURIComponent(one.hash)}` }, one.sources?.join(", ") || one.hash.slice(0, 12)), h("small", { class: "mono" }, one.hash.slice(0, 16))),
    h("td", { class: "number", "data-name": t("documents") }, format.count(one.documents)), h("td", { class: "number", "data-name": t("tokens") }, format.compact(one.tokens)), h("td", { class: "number", "data-name": t("rows") }, format.count(one.rows)), h("td", { class: "number", "data-name": t("size") }, format.bytes(one.bytes)), h("td", { class: "number nowrap", "data-name": t("prepared_at") }, format.moment(one.created))));
  return h("table", { class: "data-table" }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...rows));
}

export function showArtefact(root, name) {
  const report = h("div", {}, h("p", { class: "empty" }, t("loading"))), rows = new Rows(name);
  root.append(h("a", { class: "back", href: "#/data" }, icon("left"), t("nav_data")), h("header", { class: "page-head" }, h("h1", { class: "mono" }, name.slice(0, 16))), report, rows.element);
  get(path(name)).then((found) => report.replaceChildren(...drawReport(found, (text) => rows.search(text))), (error) => report.replaceChildren(failed(error)));
}

const LEFT_OUT = new Set(["too_short", "too_long", "other_languages", "label_false", "train_false", "weight_false", "near_duplicates", "duplicates"]);
const leftOut = (why) => (LEFT_OUT.has(why) ? t(`left_out_${why}`) : why.replaceAll("_", " "));

function drawReport(report, search) {
  const train = report.train ?? {}, held = report.eval ?? {};
  const figures = [
    [t("documents"), format.count(train.documents), held.documents ? t("held_out", { n: format.count(held.documents) }) : ""],
    [t("tokens"), format.compact(train.tokens), t("trained", { n: format.compact(train.trained_tokens) })],
    [t("rows"), format.count(train.rows), report.max_length ? t("of_tokens", { n: format.count(report.max_length) }) : ""],
    [t("fill"), format.percent(train.fill, 1), ""],
    [t("duplicates"), format.count(report.duplicates ?? 0), report.near_duplicates ? t("near_duplicates", { n: format.count(report.near_duplicates) }) : t("exact")],
    [t("bad_records"), format.count(report.damaged ?? 0), report.records ? t("of_records", { n: format.count(report.records) }) : ""],
  ];
  const parts = [h("dl", { class: "facts" }, ...figures.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, more)))))];
  if (report.sources?.length) parts.push(h("h2", {}, t("sources")), h("ul", { class: "plain" }, ...report.sources.map((one) => h("li", {}, typeof one === "string" ? one : [one.name ?? one.path, one.format, one.documents !== undefined ? t("n_documents", { n: format.count(one.documents) }) : ""].filter(Boolean).join(" · ")))));
  if (train.lengths?.length) parts.push(h("h2", {}, t("lengths")), histogram(train.lengths, report.max_length));
  const languages = Object.entries(report.languages ?? {}).filter(([, share]) => share >= 0.005);
  if (languages.length) parts.push(h("h2", {}, t("languages")), h("p", {}, languages.slice(0, 8).map(([code, share]) => `${code} ${format.percent(share)}`).join(" · ")));
  const left = Object.entries(report.left_out ?? {}).filter(([, n]) => n);
  if (left.length) parts.push(h("h2", {}, t("left_out")), h("ul", { class: "plain" }, ...left.map(([why, n]) => h("li", {}, `${leftOut(why)}${t("colon")}${format.count(n)}`))));
  if (report.damaged_examples?.length) parts.push(h("h2", {}, t("bad_records")), h("ul", { class: "plain" }, ...report.damaged_examples.map((one) => h("li", {}, h("code", {}, one.join(": "))))));
  if (report.duplicate_examples?.length) parts.push(h("h2", {}, t("duplicates")), h("div", { class: "examples duplicates" }, ...report.duplicate_examples.map((one) => drawDuplicate(one, search))));
  return parts;
}

// A text that came again, where, and a way to its rows.
function drawDuplicate({ kind, count, where, text }, search) {
  const more = count > where.length ? ` ${t("and_more", { n: format.count(count - where.length) })}` : "";
  const words = text.replace(/<\|[^|]*\|>\S*/g, "\n").split("\n").map((line) => line.trim()).sort((a, b) => b.length - a.length)[0].slice(0, 60);
  const button = words ? h("button", { type: "button", class: "quiet", onclick: () => search(words) }, icon("search"), t("show_rows")) : null;
  const head = h("h3", {}, h("span", { class: "tag" }, t(`duplicate_${kind}`)), ` ${t("repeated_at", { where: where.join(", ") })}${more}`, button);
  return h("article", { class: "example" }, head, h("div", { class: "example-text", tabIndex: 0 }, text));
}

function histogram(bins, maxLength) {
  const most = Math.max(...bins.map((bin) => bin.documents), 1);
  const rows = bins.map((bin) => {
    const bar = h("i", { class: maxLength && bin.from >= maxLength ? "long" : "" });
    bar.style.width = `${(bin.documents / most) * 100}%`;
    return h("tr", {}, h("th", { scope: "row" }, `${format.count(bin.from)}–${format.count(bin.to)}`), h("td", { class: "hist" }, bar), h("td", { class: "number" }, format.count(bin.documents)));
  });
  return h("table", { class: "histogram" }, h("caption", { class: "hidden" }, t("lengths")), h("tbody", {}, ...rows));
}

// Rows with their mask, a few at a time, and a search in them.
class Rows {
  constructor(name) {
    this.name = name;
    this.input = h("input", { type: "search", placeholder: t("search_rows"), "aria-label": t("search_rows"), oninput: () => this.search() });
    this.list = h("div", { class: "examples" });
    this.more = h("button", { type: "button", hidden: true, onclick: () => ((this.wanted = this.list.children.length + ROWS), this.ask(this.next)) }, t("more_rows"));
    this.note = h("p", { class: "faint", role: "status" });
    this.element = h("section", {}, h("h2", {}, t("rows_with_mask")), h("p", { class: "faint" }, t("mask_legend")), h("div", { class: "toolbar" }, this.input), this.list, this.note, this.more);
    this.wanted = ROWS;
    this.ask = latest((start, signal) => get(path(name, `/examples?start=${start}&count=${ROWS}&search=${encodeURIComponent(this.input.value.trim())}`), signal), (found, start) => this.draw(found, start), (error) => this.list.replaceChildren(failed(error)), 250);
    this.ask(0);
  }

  search(text = null) {
    if (text !== null) {
      this.input.value = text;
      this.input.focus();
    }
    this.wanted = ROWS;
    this.ask(0);
  }

  draw(found, start) {
    const drawn = found.examples.map((one) => drawParts(t("row_title", { row: format.count(one.row), tokens: format.count(one.tokens), documents: format.count(one.documents) }), one.text_parts));
    if (start) this.list.append(...drawn);
    else this.list.replaceChildren(...drawn);
    this.next = found.next;
    this.more.hidden = found.next === null || found.next === undefined;
    const searched = this.input.value.trim(), done = this.more.hidden;
    if (searched && !done) this.note.textContent = t("searched_rows", { n: format.count(found.next), total: format.count(found.total) });
    else this.note.textContent = this.list.children.length ? "" : searched ? t("nothing_found") : t("no_rows");
    if (searched && !done && this.list.children.length < this.wanted && this.element.isConnected) this.ask(found.next); // the search goes on
  }
}
