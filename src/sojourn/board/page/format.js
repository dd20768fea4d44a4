// Numbers as people read them: units, currencies, durations, in the page's language.
import { current, t } from "./i18n.js";

export const NONE = "–";
const KIB = 1024;
const SYMBOLS = { CNY: "¥", USD: "$", EUR: "€" };
const formats = new Map();

function intl(options) {
  const key = current() + JSON.stringify(options);
  if (!formats.has(key)) formats.set(key, new Intl.NumberFormat(current() === "zh" ? "zh-CN" : "en-US", options));
  return formats.get(key);
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// 1,234 · 0.01234 · 1.2e-5: about `digits` digits.
export function number(value, digits = 4) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  if (Number.isInteger(value)) return intl({}).format(value);
  return intl({ maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) }).format(value);
}

export const count = (value) => (isNumber(value) ? intl({ maximumFractionDigits: 0 }).format(value) : NONE);

// 1.2k · 3.4M · 5.6B, in both languages: the units of model sizes and tokens.
export function compact(value, digits = 3) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  const [by, unit] = size >= 1e12 ? [1e12, "T"] : size >= 1e9 ? [1e9, "B"] : size >= 1e6 ? [1e6, "M"] : size >= 1e3 ? [1e3, "k"] : [1, ""];
  return intl({ maximumSignificantDigits: digits }).format(value / by) + unit;
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0, size = value;
  while (Math.abs(size) >= KIB && at < units.length - 1) [size, at] = [size / KIB, at + 1];
  return `${intl({ maximumSignificantDigits: 3 }).format(size)}\u00a0${units[at]}`;
}

export const gib = (value) => (isNumber(value) ? intl({ minimumFractionDigits: 1, maximumFractionDigits: 1 }).format(value / KIB ** 3) : NONE);

export function money(value, currency = "") {
  if (!isNumber(value)) return NONE;
  const amount = intl({ minimumFractionDigits: 2, maximumFractionDigits: 2 }).format(value);
  return SYMBOLS[currency] ? SYMBOLS[currency] + amount : currency ? `${amount}\u00a0${currency}` : amount;
}

export const percent = (value, digits = 0) => (isNumber(value) ? intl({ style: "percent", maximumFractionDigits: digits }).format(value) : NONE);

// 45 s · 3 min 20 s · 5 h 12 min · 3 d 4 h
export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  const parts = (...given) => given.map(([n, unit]) => `${n}\u00a0${t(unit)}`).join(" ");
  if (seconds > 0 && seconds < 10) return `${intl({ maximumSignificantDigits: 2 }).format(seconds)}\u00a0${t("unit_s")}`;
  if (whole < 60) return parts([whole, "unit_s"]);
  if (whole < 3600) return parts([Math.floor(whole / 60), "unit_min"], ...(whole < 600 && whole % 60 ? [[whole % 60, "unit_s"]] : []));
  if (whole < 48 * 3600) return parts([Math.floor(whole / 3600), "unit_h"], ...(whole % 3600 >= 60 ? [[Math.floor((whole % 3600) / 60), "unit_min"]] : []));
  return parts([Math.floor(whole / 86400), "unit_d"], ...(whole % 86400 >= 3600 ? [[Math.floor((whole % 86400) / 3600), "unit_h"]] : []));
}

// A range; one value where both ends read alike.
export const between = (low, high, text) => (text(low) === text(high) ? text(high) : `${text(low)} – ${text(high)}`);
export const hours = (value) => duration(isNumber(value) ? value * 3600 : NaN);

export function ago(then, now) {
  if (!isNumber(then) || then <= 0) return NONE;
  const seconds = Math.max(0, now - then);
  return seconds < 5 ? t("just_now") : t("ago", { time: coarse(seconds) });
}

function coarse(seconds) {
  const steps = [[86400, "unit_d"], [3600, "unit_h"], [60, "unit_min"], [1, "unit_s"]];
  const [by, unit] = steps.find(([by]) => seconds >= by) ?? steps.at(-1);
  return `${Math.floor(seconds / by)}\u00a0${t(unit)}`;
}

export function moment(seconds) {
  if (!isNumber(seconds) || seconds <= 0) return NONE;
  const options = { year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", hour12: false };
  return new Date(seconds * 1000).toLocaleString(current() === "zh" ? "zh-CN" : "en-CA", options).replace(",", "");
}

// A place on an x axis.
export function position(value, axis, currency = "") {
  if (axis === "time") return duration(value);
  if (axis === "tokens") return compact(value, 4);
  if (axis === "money") return money(value, currency);
  return count(value);
}
