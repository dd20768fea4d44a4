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

const SHAPES = {
  menu: "M4 7h16M4 12h16M4 17h10", plus: "M12 5v14M5 12h14", close: "M6 6l12 12M18 6L6 18",
  sliders: "M4 8h9M19 8h1M4 16h2M12 16h8M16 5.5v5M9 13.5v5",
  columns: "M4 5h16v14H4zM12 5v14", send: "M12 19V5M6 11l6-6 6 6", stop: "M7 7h10v10H7z",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3", copy: "M9 9h11v11H9zM15 9V4H4v11h5", check: "M5 13l4 4L19 7",
  again: "M19 12a7 7 0 1 1-2-5M19 4v4h-4", left: "M14 6l-6 6 6 6", right: "M10 6l6 6-6 6",
  up: "M4 11h3v9H4zM7 11l4-7c2 0 3 1 2.5 3L13 10h5c1.5 0 2.3 1 2 2.5l-1.2 6C18.5 19.5 17.5 20 16.5 20H7",
  down: "M20 13h-3V4h3zM17 13l-4 7c-2 0-3-1-2.5-3l.5-3H6c-1.5 0-2.3-1-2-2.5l1.2-6C5.5 4.5 6.5 4 7.5 4H17",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13", save: "M12 4v11M7 11l5 5 5-5M5 20h14", open: "M12 16V5M7 9l5-5 5 5M5 20h14",
};
const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", "glyph");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", SHAPES[name]);
  svg.append(path);
  return svg;
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
