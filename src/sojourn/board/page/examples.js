// Texts as the model sees them, with what it is trained on coloured.
import { h } from "./dom.js";
import { t } from "./i18n.js";

const MOST = 3000; // letters

// { where, text, spans }: spans are the trained parts, null where they are not known yet.
export function drawExample({ where, text, spans }) {
  const parts = [];
  let at = 0;
  const letters = [...text]; // as the server counts them
  for (const [start, end] of spans ?? []) {
    parts.push({ text: letters.slice(at, start).join(""), trained: false }, { text: letters.slice(start, end).join(""), trained: true });
    at = end;
  }
  parts.push({ text: letters.slice(at).join(""), trained: false });
  return drawParts(where, parts);
}

// Parts: [{ text, trained }]
export function drawParts(title, parts) {
  let left = MOST;
  const shown = [];
  for (const { text, trained } of parts.filter((part) => part.text)) {
    if (left <= 0) break;
    const piece = text.slice(0, left);
    left -= piece.length;
    shown.push(trained ? h("mark", { title: t("trained_on") }, piece) : h("span", {}, piece));
  }
  if (left <= 0) shown.push(h("span", { class: "faint" }, " […]"));
  return h("article", { class: "example" }, h("h3", {}, title), h("div", { class: "example-text", tabIndex: 0 }, ...shown));
}
