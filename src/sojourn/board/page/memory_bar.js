// The memory of a run on a card: one bar, a part for each component, against what the card has.
import { h } from "./dom.js";
import * as format from "./format.js";
import { t } from "./i18n.js";

const GIB = 1024 ** 3;
const KINDS = ["weights", "adapters", "gradients", "optimizer states", "activations", "logits", "temporary buffers", "outside"];
export const kindName = (kind) => (KINDS.includes(kind) ? t(`memory_${kind.replaceAll(" ", "_")}`) : kind);

// by_kind: bytes of each component; device: all that the card must have; usable: what it has.
export function partsOf(byKind, allocated, device) {
  const parts = { ...byKind, outside: Math.max(0, device - allocated) };
  return KINDS.filter((kind) => parts[kind] > 0.02 * GIB || (kind === "weights" && parts[kind])).map((kind) => ({ kind, bytes: parts[kind] }));
}

export function memoryBar(parts, usableGib) {
  const total = parts.reduce((sum, { bytes }) => sum + bytes, 0), over = usableGib && total > usableGib * GIB;
  const label = parts.map(({ kind, bytes }) => `${kindName(kind)} ${format.gib(bytes)} GiB`).join(", ");
  const width = Math.max((usableGib ?? 0) * GIB, total);
  const bar = h("div", { class: `memory${over ? " over" : ""}`, role: "img", "aria-label": t("memory_bar", { total: format.gib(total), usable: usableGib ? format.gib(usableGib * GIB) : "?", parts: label }) });
  for (const { kind, bytes } of parts) {
    const part = h("i", { class: `m${KINDS.indexOf(kind)}`, title: `${kindName(kind)} ${format.gib(bytes)} GiB` });
    part.style.width = `${(bytes / width) * 100}%`;
    bar.append(part);
  }
  if (usableGib && usableGib * GIB < width) {
    const end = h("b", { class: "end" });
    end.style.left = `${((usableGib * GIB) / width) * 100}%`;
    bar.append(end);
  }
  return bar;
}

export function memoryLegend(parts) {
  return h("ul", { class: "memory-legend" }, ...parts.map(({ kind, bytes }) => h("li", {}, h("i", { class: `m${KINDS.indexOf(kind)}` }), kindName(kind), h("b", {}, `${format.gib(bytes)} GiB`))));
}
