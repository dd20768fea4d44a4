// A conversation is a tree of messages: editing and answering again add a branch, and one branch is shown.
//
// Node: { id, parent, role, content, … }. Of an answer also: model, reasoning, tool_calls, finish, usage, seconds, error,
// rating, edited (the id of the answer that it corrects), pair (shared by two answers side by side). `picked` has, for a
// parent's id, the child that is shown.

export const ROOT = "root";

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(like = {}) {
  const { system = "", params = {}, stops = "", tools = "", models = ["", ""], compare = false } = like;
  const copied = structuredClone({ system, params, stops, tools, models, compare });
  return { id: newId(), created: Date.now(), updated: Date.now(), ...copied, nodes: {}, picked: {} };
}

export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent, content: "", ...fields };
  conversation.nodes[node.id] = node;
  conversation.picked[parent] = node.id;
  conversation.updated = Date.now();
  return node;
}

export const childrenOf = (conversation, parent) => Object.values(conversation.nodes).filter((node) => node.parent === parent);

export function pickedChild(conversation, parent) {
  const children = childrenOf(conversation, parent);
  return children.find((node) => node.id === conversation.picked[parent]) ?? children.at(-1);
}

// The nodes that are shown, from the first.
export function shownPath(conversation) {
  const path = [];
  for (let node = pickedChild(conversation, ROOT); node; node = pickedChild(conversation, node.id)) path.push(node);
  return path;
}

// The other answer of a pair.
export function partnerOf(conversation, node) {
  return node.pair && childrenOf(conversation, node.parent).find((other) => other.pair === node.pair && other !== node);
}

// A node and its siblings, of which two side by side count as one: a list of nodes to pick, and the place of this one.
export function versionsOf(conversation, node) {
  const seen = new Set(), versions = [];
  for (const one of childrenOf(conversation, node.parent)) {
    if (one.pair && seen.has(one.pair)) continue;
    seen.add(one.pair);
    versions.push(one);
  }
  return { versions, at: versions.findIndex((one) => one === node || (one.pair && one.pair === node.pair)) };
}

// What the server gets: the system prompt and everything from the first message to `last`.
export function messagesTo(conversation, last) {
  const messages = [];
  for (let node = last; node; node = conversation.nodes[node.parent]) messages.unshift(asMessage(node));
  return conversation.system.trim() ? [{ role: "system", content: conversation.system }, ...messages] : messages;
}

export function asMessage(node) {
  if (node.role === "tool") return { role: "tool", content: node.content, tool_call_id: node.tool_call_id };
  if (!node.tool_calls?.length) return { role: node.role, content: node.content };
  return { role: node.role, content: node.content || null, tool_calls: node.tool_calls };
}

export function titleOf(conversation) {
  const first = shownPath(conversation).find((node) => node.role === "user");
  return first ? first.content.trim().replace(/\s+/g, " ").slice(0, 60) : "";
}
