// Conversations as files: JSON with every branch, which can be opened again, and Markdown of the branch shown.
import { addNode, newConversation, newId, ROOT, shownPath, titleOf } from "./conversation.js";
import { t } from "./i18n.js";

const FORMAT = "sojourn-chat";
const ROLES = ["user", "assistant", "tool"];

export function toJson(conversation) {
  return JSON.stringify({ format: FORMAT, version: 1, title: titleOf(conversation), conversation }, null, 2);
}

export function toMarkdown(conversation) {
  const names = { user: t("you"), tool: t("tool") };
  const parts = [`# ${titleOf(conversation) || t("untitled")}`];
  if (conversation.system.trim()) parts.push(`## ${t("system")}`, conversation.system);
  for (const node of shownPath(conversation)) {
    parts.push(`## ${names[node.role] ?? (node.model || t("model"))}`);
    if (node.content) parts.push(node.content);
    for (const call of node.tool_calls ?? []) parts.push(`\`${call.function.name}(${call.function.arguments})\``);
  }
  return parts.join("\n\n") + "\n";
}

export function fileName(conversation) {
  return (titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 40) || "chat").toLowerCase();
}

// Raises an Error with a reason. Only fields that we know are taken, and every message gets a new id.
export function fromJson(text) {
  const given = JSON.parse(text);
  if (Array.isArray(given?.messages)) return fromMessages(given.messages);
  const old = given?.format === FORMAT ? given.conversation : null;
  if (!old || typeof old.nodes !== "object" || old.nodes === null) throw new Error(t("not_chat"));
  const made = newConversation();
  for (const name of ["system", "stops", "tools"]) made[name] = text_(old[name] ?? "");
  made.params = Object.fromEntries(Object.entries(old.params ?? {}).filter(([, value]) => Number.isFinite(value)));
  const ids = new Map([[ROOT, ROOT]]), pairs = new Map(), waiting = new Map(Object.entries(old.nodes));
  for (let before = -1; waiting.size && waiting.size !== before; ) {
    before = waiting.size;
    for (const [id, node] of waiting) {
      if (!ids.has(node.parent)) continue;
      ids.set(id, addNode(made, ids.get(node.parent), fieldsOf(node, pairs)).id);
      waiting.delete(id);
    }
  }
  if (waiting.size) throw new Error(t("not_chat"));
  for (const [id, child] of Object.entries(old.picked ?? {})) {
    if (ids.has(id) && ids.has(child)) made.picked[ids.get(id)] = ids.get(child);
  }
  return made;
}

function fromMessages(messages) {
  const made = newConversation();
  let parent = ROOT;
  for (const message of messages) {
    if (message.role === "system") made.system = text_(message.content);
    else parent = addNode(made, parent, fieldsOf(message, new Map())).id;
  }
  return made;
}

function fieldsOf(node, pairs) {
  if (!ROLES.includes(node.role)) throw new Error(t("not_chat"));
  const fields = { role: node.role, content: text_(node.content ?? "") };
  for (const name of ["model", "reasoning", "finish", "tool_call_id"]) if (node[name]) fields[name] = text_(node[name]);
  if (node.pair) fields.pair = pairs.get(node.pair) ?? pairs.set(node.pair, newId()).get(node.pair);
  if (Array.isArray(node.tool_calls)) {
    fields.tool_calls = node.tool_calls.map((call) => ({
      id: text_(call.id), type: "function",
      function: { name: text_(call.function.name), arguments: text_(call.function.arguments) },
    }));
  }
  return fields;
}

function text_(value) {
  if (typeof value !== "string") throw new Error(t("not_chat"));
  return value;
}
