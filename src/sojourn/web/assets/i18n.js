// The language of the page: the browser's, or the one that was chosen. Each page has its own en.js and zh.js.
import en from "./en.js";
import zh from "./zh.js";

const KEY = "sojourn.language";
const texts = { en, zh };
let language = localStorage.getItem(KEY) ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");
if (!(language in texts)) language = "en";

export const current = () => language;

export function t(key, values = {}) {
  return texts[language][key].replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

export function choose(chosen) {
  language = chosen;
  localStorage.setItem(KEY, chosen);
}

// data-text: of an element's content; data-label: of its name for screen readers and its tooltip.
export function translate(root = document) {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const element of root.querySelectorAll("[data-text]")) element.textContent = t(element.dataset.text);
  for (const element of root.querySelectorAll("[data-placeholder]")) element.placeholder = t(element.dataset.placeholder);
  for (const element of root.querySelectorAll("[data-label]")) {
    element.setAttribute("aria-label", t(element.dataset.label));
    element.title = t(element.dataset.label);
  }
}
