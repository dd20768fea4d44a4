// Light, dark, or as the system: the one that was chosen is kept in this browser.
const KEY = "sojourn.theme";

export const currentTheme = () => localStorage.getItem(KEY) ?? "auto";

export function setTheme(theme) {
  localStorage.setItem(KEY, theme);
  document.documentElement.dataset.theme = theme;
}
