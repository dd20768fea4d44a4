// Requests to the server: models, streamed answers, feedback. What fails is a Failure with the server's own words.
const KEY = "sojourn.key";

export class Failure extends Error {
  constructor(kind, message = "", seconds = 0) {
    super(message);
    this.kind = kind; // gone, cut, key, busy, context, loading, not_found, failed
    this.seconds = seconds;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const hasKey = () => sessionStorage.getItem(KEY) !== null;

async function request(path, options = {}) {
  const headers = { ...(options.body && { "content-type": "application/json" }) };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(path, location.origin), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("gone");
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

async function failureOf(response) {
  const error = (await response.json().catch(() => ({}))).error ?? {};
  return asFailure(response.status, error, Number(response.headers.get("retry-after")) || 0);
}

function asFailure(status, error, seconds = 0) {
  const message = error.message ?? `HTTP ${status}`;
  if (status === 401) return new Failure("key", message);
  if (status === 429) return new Failure("busy", message, seconds);
  if (status === 503 && error.code === "starting") return new Failure("loading", message, seconds || 2);
  if (error.code === "context_length_exceeded") return new Failure("context", message);
  if (error.code === "model_not_found") return new Failure("not_found", message);
  return new Failure("failed", message);
}

export async function listModels() {
  return (await (await request("/v1/models")).json()).data;
}

export async function feedbackEnabled() {
  return (await (await request("/v1/feedback")).json()).enabled;
}

export async function sendFeedback(body) {
  await request("/v1/feedback", { method: "POST", body: JSON.stringify(body) });
}

// Calls `add` with each choice's delta and finish reason; returns the usage.
export async function streamChat(body, signal, add) {
  const whole = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify(whole), signal });
  let usage = null, complete = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        complete = true;
        continue;
      }
      const event = JSON.parse(data);
      if (event.error) throw asFailure(0, event.error);
      usage = event.usage ?? usage;
      if (event.choices?.length) add(event.choices[0].delta ?? {}, event.choices[0].finish_reason);
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Failure) throw error;
    throw new Failure("cut");
  }
  if (!complete) throw new Failure("cut");
  return usage;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length) yield data.join("\n");
    }
  }
}
