// A button that opens a short list of actions.
import { h, icon } from "./dom.js";

// items(): [{ text, act } or { text, href } or { text, act, disabled }], asked for when the menu is opened.
export function menu(name, label, items, more = {}) {
  const list = h("div", { class: "menu-list", role: "menu", popover: "manual" }); // in the top layer: nothing around it cuts it off
  const button = h("button", { type: "button", class: "icon", "aria-label": label, title: label, "aria-haspopup": "menu", "aria-expanded": "false", ...more }, icon(name));
  const element = h("div", { class: "menu" }, button, list);
  const isOpen = () => list.matches(":popover-open");
  const close = () => {
    if (isOpen()) list.hidePopover();
    button.setAttribute("aria-expanded", "false");
    document.removeEventListener("pointerdown", outside);
  };
  const outside = (event) => element.contains(event.target) || close();
  const item = ({ text, act, href, disabled = false }) => {
    const properties = { role: "menuitem", class: "menu-item" };
    if (href) return h("a", { ...properties, href, download: "", onclick: close }, text);
    return h("button", { ...properties, type: "button", disabled, onclick: () => (close(), button.focus(), act()) }, text);
  };
  button.addEventListener("click", () => {
    if (isOpen()) return close();
    list.replaceChildren(...items().map(item));
    list.showPopover();
    place(button, list);
    button.setAttribute("aria-expanded", "true");
    document.addEventListener("pointerdown", outside);
    list.querySelector("a, button:not(:disabled)")?.focus();
  });
  element.addEventListener("keydown", (event) => {
    if (!isOpen()) return;
    const all = [...list.querySelectorAll("a, button:not(:disabled)")], at = all.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    if (event.key === "Escape") (close(), button.focus());
    else if (event.key === "Tab") return close();
    else if (to !== undefined) all.at(to % all.length)?.focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return element;
}

// Above the button where there is no room below it.
function place(button, list) {
  const box = button.getBoundingClientRect(), size = list.getBoundingClientRect();
  const below = box.bottom + 4 + size.height <= innerHeight;
  list.style.top = `${below ? box.bottom + 4 : Math.max(4, box.top - 4 - size.height)}px`;
  list.style.left = `${Math.max(4, Math.min(box.right - size.width, innerWidth - size.width - 4))}px`;
}
