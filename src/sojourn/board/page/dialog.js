// One dialog at a time: what is about to happen, the line that does it, and a button.
import { latest, post } from "./api.js";
import { copyButton, h, iconButton } from "./dom.js";
import { t } from "./i18n.js";
import { openTask } from "./tasks.js";

const dialog = () => document.getElementById("dialog");

// fields: [{ name, label, options: [{ value, text }] } or { name, label, value, placeholder }]
export function ask({ title, text, fields = [], preview, act, button, danger = false }) {
  const inputs = fields.map(makeField), values = () => Object.fromEntries(inputs.map(({ name, input }) => [name, input.value]));
  const line = h("code", { id: "dialog-line" }), error = h("p", { class: "error", role: "alert", hidden: true });
  const yes = h("button", { type: "submit", class: danger ? "primary danger" : "primary" }, button);
  const show = (message) => Object.assign(error, { hidden: !message, textContent: message });
  const refresh = preview && latest((signal) => preview(values(), signal), (found) => {
    line.textContent = found;
    yes.disabled = false;
    show("");
  }, (failure) => {
    line.textContent = "";
    yes.disabled = true;
    show(failure.message || t("board_gone_short"));
  }, 60);
  const form = h("form", { method: "dialog", onsubmit: async (event) => {
    event.preventDefault();
    yes.disabled = true;
    try {
      const done = await act(values());
      dialog().close();
      done?.();
    } catch (failure) {
      show(failure.message || t("board_gone_short"));
      yes.disabled = false;
    }
  } },
    h("div", { class: "dialog-head" }, h("h2", { id: "dialog-title" }, title), iconButton("close", "close", () => dialog().close())),
    text && h("p", {}, text), ...inputs.map(({ label }) => label),
    preview && h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, t("same_as")), copyButton(() => line.textContent)), h("pre", {}, line)),
    error, h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog().close() }, t("cancel")), yes));
  for (const { input } of inputs) input.addEventListener("input", () => refresh?.());
  dialog().replaceChildren(form);
  dialog().showModal();
  yes.disabled = Boolean(preview);
  refresh?.();
}

function makeField({ name, label, options, value = "", placeholder = "" }) {
  const input = options ? h("select", { name }, ...options.map((one) => h("option", { value: one.value }, one.text))) : h("input", { name, placeholder, autocomplete: "off" });
  input.value = value || (options?.[0]?.value ?? "");
  return { name, input, label: h("label", {}, h("span", {}, label), input) };
}

// An action of the board that becomes a task.
export function askAction({ path, body = () => ({}), ...rest }) {
  ask({
    ...rest,
    preview: async (values) => (await post(path, { ...body(values), preview: true })).line,
    act: async (values) => {
      const found = await post(path, body(values));
      return () => (found.task ? openTask(found.task.id) : undefined, rest.done?.(found));
    },
  });
}
