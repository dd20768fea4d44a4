// Requests to the board, and asking again and again without one request overtaking another.
import { current } from "./i18n.js";

export class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status; // 0: no answer
  }
}

let session = null;

export async function openSession() {
  session = await request("/api/session");
  return session;
}

export const get = (path, signal) => request(path, { signal });

export const post = (path, body) => send(path, JSON.stringify(body), "application/json");

export const upload = (file) => send(`/api/upload?name=${encodeURIComponent(file.name)}`, file, "application/octet-stream");

export const runPath = (id, rest = "") => `/api/runs/${encodeURIComponent(id)}${rest}`;

async function send(path, body, type) {
  const once = () => request(path, { method: "POST", body, headers: { "content-type": type, "x-sojourn-token": session.token } });
  if (!session) await openSession();
  try {
    return await once();
  } catch (error) {
    if (error.status !== 403) throw error;
    await openSession(); // the board was started again
    return once();
  }
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...options.headers, "accept-language": current() }, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "");
  }
  if (response.ok) return response.json();
  const answer = await response.json().catch(() => ({}));
  throw new Failure(response.status, typeof answer.error === "string" ? answer.error : `HTTP ${response.status}`);
}

const SLOWEST = 30;
const connection = { failures: 0, changed: () => {} };

// `changed(error, seconds)`: the board does not answer and is asked again in so many seconds; error is null when it answers again.
export function onConnection(changed) {
  connection.changed = changed;
}

function connected() {
  if (connection.failures) connection.changed(null);
  connection.failures = 0;
}

// Calls `ask(signal)` every `seconds` (`hidden` seconds in a hidden tab), the next time only when the last has ended; slower and
// slower while the board does not answer. `stop` ends it; `now` asks at once.
export function poll(ask, seconds, hidden = 5) {
  const stopper = new AbortController();
  let timer = 0, running = false, queued = false, failures = 0;
  const again = () => {
    const usual = document.hidden ? Math.max(seconds, hidden) : seconds;
    const wait = failures ? Math.min(SLOWEST, usual * 2 ** failures) : usual;
    timer = setTimeout(turn, wait * 1000);
    return wait;
  };
  const turn = async () => {
    clearTimeout(timer);
    queued = running;
    if (running || stopper.signal.aborted) return;
    running = true;
    let failure = null;
    try {
      await ask(stopper.signal);
      connected();
    } catch (error) {
      if (!(error instanceof Failure)) {
        if (error.name !== "AbortError") console.error(error);
      } else failure = error;
    }
    running = false;
    failures = failure ? failures + 1 : 0;
    if (stopper.signal.aborted) return;
    if (queued) return turn();
    const wait = again();
    if (failure?.status === 0) {
      connection.failures += 1;
      connection.changed(failure, wait);
    }
  };
  turn();
  return {
    now: turn,
    stop() {
      stopper.abort();
      clearTimeout(timer);
    },
  };
}

// Calls `ask(...)` once the caller has been quiet for a moment; an answer that was overtaken by a later question is dropped.
export function latest(ask, answer, failed, quiet = 180) {
  let timer = 0, number = 0, stopper = null;
  return (...given) => {
    clearTimeout(timer);
    const mine = ++number;
    timer = setTimeout(async () => {
      stopper?.abort();
      stopper = new AbortController();
      try {
        const found = await ask(...given, stopper.signal);
        if (mine === number) answer(found, ...given);
      } catch (error) {
        if (mine === number && error.name !== "AbortError") failed(error);
      }
    }, quiet);
  };
}
