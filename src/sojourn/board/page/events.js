// Events of a run as sentences.
import * as format from "./format.js";
import { t } from "./i18n.js";

const KNOWN = new Set(["start", "saved", "best", "out_of_memory", "restarted", "spike", "bad_step", "stopped", "budget", "failed", "done", "mirrored", "mirror_failed", "save_failed", "damaged_checkpoint", "config_changed", "ended_early", "suspect_hardware", "low_host_memory", "bad_weights", "bad_gradients", "best_failed", "folder_gone", "not_written", "tracker_failed"]);
const FACTS = new Set(["again", "attention", "available", "device", "limit", "loss", "norm", "parameters", "path", "policy", "precision", "processes", "restart", "seconds", "stalled", "tokens", "total_steps", "tracker", "trained", "where"]);
const NOT_SAID = new Set(["kind", "time", "step", "x", "rows"]);

// Where a run starts for the first time there is nothing to mark.
export const isMarked = (event) => !(event.kind === "start" && !event.step);
const factName = (key) => (FACTS.has(key) ? t(`fact_${key}`) : key.replaceAll("_", " "));
export const eventName = (kind) => (KNOWN.has(kind) ? t(`event_${kind}`) : String(kind).replaceAll("_", " "));

// What else is known of an event, in one line.
export function eventFacts(event) {
  const known = event.message ?? event.error ?? event.why ?? event.reason;
  const now = event.now ? t("event_now", { now: event.now }) : "";
  if (known) return [known, now].filter(Boolean).join(" · ");
  if (event.kind === "saved" && event.seconds !== undefined) return format.duration(event.seconds);
  if (event.kind === "config_changed") return `${event.key}${t("colon")}${event.before} → ${event.now}`;
  const facts = Object.entries(event).filter(([key, value]) => !NOT_SAID.has(key) && value !== null && typeof value !== "object");
  return facts.map(([key, value]) => `${factName(key)} ${typeof value === "number" ? format.number(value) : value}`).join(" · ");
}

export function describeEvent(event) {
  const step = event.step === undefined || event.step === null ? "" : ` · ${t("at_step", { step: format.count(event.step) })}`;
  const facts = eventFacts(event);
  return `${eventName(event.kind)}${step}${facts ? `${t("colon")}${facts.slice(0, 160)}` : ""}`;
}
