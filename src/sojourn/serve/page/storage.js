// Conversations in this browser, one entry each, so that two tabs do not overwrite each other's.
const PREFIX = "sojourn.chat.";

export function loadAll() {
  const found = [];
  for (const key of Object.keys(localStorage)) {
    if (!key.startsWith(PREFIX)) continue;
    try {
      found.push(JSON.parse(localStorage.getItem(key)));
    } catch {
      localStorage.removeItem(key); // not ours, or damaged
    }
  }
  return found.sort((one, other) => other.updated - one.updated);
}

// False where there is no room left.
export function save(conversation) {
  if (!Object.keys(conversation.nodes).length) return true;
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export const remove = (conversation) => localStorage.removeItem(PREFIX + conversation.id);
export const isStored = (key) => key === null || key.startsWith(PREFIX);
