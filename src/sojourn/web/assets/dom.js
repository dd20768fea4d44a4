// Small helpers: elements, icons, the clipboard, files. A page has the texts "copy" and "copied", and an element #live.
import { t } from "./i18n.js";

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

const SHAPES = {
  menu: "M4 7h16M4 12h16M4 17h10", plus: "M12 5v14M5 12h14", close: "M6 6l12 12M18 6L6 18",
  sliders: "M4 8h9M19 8h1M4 16h2M12 16h8M16 5.5v5M9 13.5v5",
  columns: "M4 5h16v14H4zM12 5v14", send: "M12 19V5M6 11l6-6 6 6", stop: "M7 7h10v10H7z",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3", copy: "M9 9h11v11H9zM15 9V4H4v11h5", check: "M5 13l4 4L19 7",
  again: "M19 12a7 7 0 1 1-2-5M19 4v4h-4", left: "M14 6l-6 6 6 6", right: "M10 6l6 6-6 6",
  up: "M4 11h3v9H4zM7 11l4-7c2 0 3 1 2.5 3L13 10h5c1.5 0 2.3 1 2 2.5l-1.2 6C18.5 19.5 17.5 20 16.5 20H7",
  down: "M20 13h-3V4h3zM17 13l-4 7c-2 0-3-1-2.5-3l.5-3H6c-1.5 0-2.3-1-2-2.5l1.2-6C5.5 4.5 6.5 4 7.5 4H17",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13", save: "M12 4v11M7 11l5 5 5-5M5 20h14", open: "M12 16V5M7 9l5-5 5 5M5 20h14",
  runs: "M4 19V5M4 19h16M8 15l3-5 3 3 5-8", plan: "M4 20V10M10 20V4M16 20v-7M3 20h18", data: "M5 6c0-3 14-3 14 0v12c0 3-14 3-14 0zM5 6c0 3 14 3 14 0M5 12c0 3 14 3 14 0",
  tasks: "M4 5h16v14H4zM7 9l3 3-3 3M13 15h4", more: "M5 11h2v2H5zM11 11h2v2h-2zM17 11h2v2h-2z", play: "M8 5l11 7-11 7z", pull: "M12 4v11M7 11l5 5 5-5M5 20h14",
  move: "M4 12h15M14 7l5 5-5 5", tag: "M4 4h8l8 8-8 8-8-8zM8.5 8.5h.01", search: "M11 4a7 7 0 1 1 0 14 7 7 0 0 1 0-14M16 16l4.5 4.5", reset: "M4 12a8 8 0 1 0 3-6M7 2v4h4",
  chat: "M4 5h16v11H10l-5 4v-4H4z", minus: "M5 12h14", globe: "M12 3a9 9 0 1 1 0 18 9 9 0 0 1 0-18M3 12h18M12 3c5 5 5 13 0 18M12 3c-5 5-5 13 0 18",
  theme: "M12 4a8 8 0 1 0 8 8c-6 2-10-2-8-8z", file: "M6 3h8l4 4v14H6zM14 3v4h4", warn: "M12 4l9 16H3zM12 10v4M12 17h.01",
};

export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true", class: "glyph" }, svg("path", { d: SHAPES[name] }));
}

export function iconButton(name, key, onclick, more = {}) {
  return h("button", { type: "button", class: "icon", "aria-label": t(key), title: t(key), onclick, ...more }, icon(name));
}

export function copyButton(text) {
  const button = iconButton("copy", "copy", async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    button.title = t("copied");
    announce(t("copied"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", { value: text, class: "hidden" }); // pages over plain HTTP have no clipboard
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// For screen readers.
export function announce(text) {
  document.getElementById("live").textContent = text;
}

export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
