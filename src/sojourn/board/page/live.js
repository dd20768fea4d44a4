// The list of runs, asked for again and again; pages are called when it has changed.
import { get, poll } from "./api.js";

const SECONDS = 2;
export const live = { runs: [], hosts: [], gpus: [], now: 0, loaded: false };
const listeners = new Set();
let poller;

export function startLive() {
  poller = poll(async (signal) => {
    Object.assign(live, await get("/api/runs", signal), { loaded: true });
    for (const listener of listeners) listener();
  }, SECONDS);
}

export const askNow = () => poller.now();
export const findRun = (id) => live.runs.find((run) => run.id === id);
export const isRunning = (run) => ["starting", "running", "preparing", "queued"].includes(run?.state);

// Answers how to end it.
export function onLive(listener) {
  listeners.add(listener);
  if (live.loaded) listener();
  return () => listeners.delete(listener);
}
