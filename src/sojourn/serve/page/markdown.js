// Markdown as elements. Every text is set as text, never as HTML, so nothing that a model writes can run.
import { copyButton, h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;

// Replaces only the blocks that differ from those shown: an answer that grows is not drawn anew.
export function showMarkdown(element, text) {
  const blocks = splitBlocks(text);
  const shown = element.shownBlocks ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && blocks[same].raw === shown[same]) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) element.append(drawBlock(block));
  element.shownBlocks = blocks.map((block) => block.raw);
}

function splitBlocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n"), blocks = [];
  for (let at = 0; at < lines.length; ) {
    const start = at, kind = kindAt(lines, at);
    if (kind === "blank") {
      at++;
      continue;
    }
    if (kind === "code") {
      const mark = FENCE.exec(lines[at++])[1];
      while (at < lines.length && !isEnd(lines[at], mark)) at++;
      at++;
    } else if (kind === "rule" || kind === "heading") at++;
    else if (kind === "list") {
      at++;
      while (at < lines.length && (kindAt(lines, at) === "list" || /^\s{2,}\S/.test(lines[at]) || blankInList(lines, at))) at++;
    } else if (kind === "quote") while (at < lines.length && lines[at].startsWith(">")) at++;
    else if (kind === "table") while (at < lines.length && lines[at].includes("|")) at++;
    else while (at < lines.length && kindAt(lines, at) === "text") at++;
    const own = lines.slice(start, at);
    blocks.push({ kind, lines: own, raw: `${kind}\n${own.join("\n")}` });
  }
  return blocks;
}

const isEnd = (line, mark) => line.trim().startsWith(mark) && line.trim().replaceAll(mark[0], "") === "";
const blankInList = (lines, at) => !lines[at].trim() && at + 1 < lines.length && /^\s{2,}\S/.test(lines[at + 1]);

function kindAt(lines, at) {
  const line = lines[at];
  if (!line.trim()) return "blank";
  if (FENCE.test(line)) return "code";
  if (RULE.test(line)) return "rule";
  if (HEADING.test(line)) return "heading";
  if (ITEM.test(line)) return "list";
  if (line.startsWith(">")) return "quote";
  if (line.includes("|") && /^[\s|:-]+$/.test(lines[at + 1] ?? "") && /-.*\||\|.*-/.test(lines[at + 1])) return "table";
  return "text";
}

const DRAW = {
  code: (lines) => drawCode(lines),
  rule: () => h("hr"),
  heading: (lines) => {
    const [, marks, text] = HEADING.exec(lines[0]);
    return h(`h${Math.min(6, marks.length + 1)}`, {}, ...inline(text));
  },
  list: (lines) => drawList(lines),
  quote: (lines) => {
    const quote = h("blockquote");
    for (const block of splitBlocks(lines.map((line) => line.replace(/^> ?/, "")).join("\n"))) quote.append(drawBlock(block));
    return quote;
  },
  table: (lines) => drawTable(lines),
  text: (lines) => h("p", {}, ...inline(lines.join("\n"))),
};
const drawBlock = (block) => DRAW[block.kind](block.lines);

function drawCode(lines) {
  const [, mark, language] = FENCE.exec(lines[0]);
  const last = lines.length > 1 && isEnd(lines.at(-1), mark) ? -1 : undefined;
  const text = lines.slice(1, last).join("\n");
  const head = h("div", { class: "code-head" }, h("span", {}, language), copyButton(() => text));
  return h("div", { class: "code" }, head, h("pre", { tabIndex: 0 }, h("code", {}, text)));
}

function drawList(lines) {
  const indent = ITEM.exec(lines[0])[1].length, ordered = /\d/.test(ITEM.exec(lines[0])[2][0]);
  const list = h(ordered ? "ol" : "ul");
  if (ordered) list.start = parseInt(ITEM.exec(lines[0])[2], 10);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent + 1) items.push([found[3]]);
    else items.at(-1).push(line.slice(Math.min(line.search(/\S|$/), indent + 2)));
  }
  for (const [first, ...rest] of items) {
    const item = h("li", {}, ...inline(first));
    for (const block of splitBlocks(rest.join("\n"))) item.append(drawBlock(block));
    list.append(item);
  }
  return list;
}

function drawTable(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const row = (line, tag) => h("tr", {}, ...cells(line).map((cell) => h(tag, {}, ...inline(cell))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  return h("div", { class: "table", tabIndex: 0 }, h("table", {}, h("thead", {}, row(lines[0], "th")), h("tbody", {}, ...body)));
}

const INLINE = /(`+)([^`]|[^`][^]{0,2000}?[^`])\1(?!`)|\*\*([^\s*][^]{0,2000}?)\*\*(?!\*)|~~([^~]{1,2000})~~|\*([^\s*][^*]{0,2000})\*|\b_([^\s_][^_]{0,2000})_\b|!?\[([^[\]]{0,1000})\]\(([^()\s]{1,2000})[^()]{0,200}\)|(https?:\/\/[^\s<>"')\]]{1,2000})|\\([\\`*_~[\]()#>|-])/g;

function inline(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > at) parts.push(text.slice(at, found.index));
    at = found.index + found[0].length;
    const [whole, , code, bold, strike, italic, italic2, label, target, bare, escaped] = found;
    if (code !== undefined) parts.push(h("code", {}, code.trim() || code));
    else if (bold !== undefined) parts.push(h("strong", {}, ...inline(bold)));
    else if (strike !== undefined) parts.push(h("del", {}, ...inline(strike)));
    else if (italic !== undefined) parts.push(h("em", {}, ...inline(italic)));
    else if (italic2 !== undefined) parts.push(h("em", {}, ...inline(italic2)));
    else if (target !== undefined) parts.push(link(target, label || target) ?? whole);
    else if (bare !== undefined) parts.push(link(bare, bare) ?? whole);
    else parts.push(escaped);
  }
  if (at < text.length) parts.push(text.slice(at));
  return parts;
}

// An image is a link too: the page loads nothing from elsewhere.
function link(target, label) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return null;
  return h("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}
