// The settings' dialog: system prompt, parameters and tools of this conversation; theme and language of the page.
import { h } from "./dom.js";
import { choose, current, t, translate } from "./i18n.js";
import { currentTheme, setTheme } from "./theme.js";

const PARAMETERS = {
  temperature: { min: 0, max: 100, step: 0.05 }, top_p: { min: 0.01, max: 1, step: 0.01 },
  top_k: { min: 0, step: 1 }, min_p: { min: 0, max: 1, step: 0.01 },
  repetition_penalty: { min: 0.05, max: 100, step: 0.05 }, max_tokens: { min: 1, step: 1 }, seed: { step: 1 },
};
const TEXTS = ["system", "stops", "tools"];
const $ = (id) => document.getElementById(id);
let conversationNow, changed;

export function setUpSettings(conversation, onChange) {
  [conversationNow, changed] = [conversation, onChange];
  $("parameters").className = "grid";
  $("parameters").replaceChildren(...Object.entries(PARAMETERS).map(([name, limits]) =>
    h("label", {}, h("span", { "data-text": name }),
      h("input", { id: `p-${name}`, type: "number", "data-placeholder": "default", ...limits, step: Number.isInteger(limits.step) ? 1 : "any" }))));
  translate($("settings"));
  setTheme(currentTheme());
  $("theme").value = currentTheme();
  $("language").value = current();
  $("theme").addEventListener("change", () => setTheme($("theme").value));
  $("language").addEventListener("change", () => {
    choose($("language").value);
    changed();
  });
  $("settings").querySelector("form").addEventListener("submit", (event) => take() || event.preventDefault());
  $("settings").addEventListener("cancel", (event) => take() || event.preventDefault());
  $("settings").addEventListener("click", (event) => event.target === $("settings") && take() && $("settings").close());
}

export function openSettings() {
  const conversation = conversationNow();
  for (const name of TEXTS) $(name).value = conversation[name];
  for (const name of Object.keys(PARAMETERS)) $(`p-${name}`).value = conversation.params[name] ?? "";
  showError("");
  $("settings").showModal();
}

// False where something is wrong: the dialog stays open and says what.
function take() {
  const conversation = conversationNow(), params = {};
  for (const name of Object.keys(PARAMETERS)) {
    const input = $(`p-${name}`);
    if (!input.checkValidity()) return showError(t("bad_parameter", { name: t(name), reason: input.validationMessage }));
    if (input.value !== "") params[name] = input.valueAsNumber;
  }
  try {
    parseTools($("tools").value);
  } catch (error) {
    return showError(t("bad_tools", { reason: error.message }));
  }
  conversation.params = params;
  for (const name of TEXTS) conversation[name] = $(name).value;
  changed();
  return true;
}

function showError(text) {
  $("settings-error").textContent = text;
  $("settings-error").hidden = !text;
  return false;
}

// A list of tools; a bare function becomes one. Raises an Error.
export function parseTools(text) {
  if (!text.trim()) return [];
  const given = JSON.parse(text);
  const list = Array.isArray(given) ? given : [given];
  return list.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}
