// Arithmetic of charts: ticks, places in pixels, smoothing.

export function ticks(low, high, wanted) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(Math.abs(at * step) < step * 1e-9 ? 0 : Number((at * step).toPrecision(12)));
  return found;
}

// Seconds in steps of minutes, hours and days.
export function timeTicks(low, high, wanted) {
  const span = high - low, nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const step = nice.find((n) => span / n <= wanted);
  if (!step || span < 2) return ticks(low, high, wanted);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(at * step);
  return found;
}

// Of a logarithmic axis of hours: what one would say.
export function hourTicks(low, high, most) {
  const said = [1 / 60, 2 / 60, 5 / 60, 10 / 60, 0.25, 0.5, 1, 2, 3, 6, 12, 24, 48, 96, 168, 336, 672, 1344, 2688].filter((n) => n >= low && n <= high);
  const every = Math.ceil(said.length / most);
  return said.length ? said.filter((_, i) => i % every === 0) : [low, high];
}

export function logTicks(low, high, wanted) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  for (const steps of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let power = from; power <= to; power++) found.push(...steps.map((n) => n * 10 ** power).filter((n) => n >= low * 0.999 && n <= high * 1.001));
    if (found.length <= wanted + 1) return found.length >= 2 ? found : ticks(low, high, wanted).filter((n) => n > 0);
  }
  const every = Math.ceil((to - from) / wanted), found = [];
  for (let power = from; power <= to; power += every) if (10 ** power >= low && 10 ** power <= high) found.push(10 ** power);
  return found;
}

// A function from values to pixels, and `.invert` back.
export function scale([low, high], [from, to], log = false) {
  const f = log ? Math.log10 : (value) => value, back = log ? (value) => 10 ** value : (value) => value;
  const start = f(low), width = f(high) - start || 1, slope = (to - from) / width, base = from - start * slope;
  const place = log ? (value) => base + Math.log10(value) * slope : (value) => base + value * slope;
  place.invert = (pixel) => back(start + ((pixel - from) / (to - from)) * width);
  return place;
}

// An exponential moving average over the x axis: its length is a share of `span`, so that it is the same however many points
// there are. `amount` is from 0 (none) to 1. Missing values stay missing.
export function smooth(xs, ys, amount, span) {
  const length = amount * amount * 0.12 * span;
  if (!(length > 0)) return ys;
  let sum = 0, weight = 0, before = xs.length > 1 ? 2 * xs[0] - xs[1] : xs[0] - length;
  return ys.map((y, i) => {
    if (y === null || !Number.isFinite(y)) return null;
    const keep = Math.exp(-(xs[i] - before) / length), share = 1 - keep || 1e-9;
    sum = sum * keep + y * share;
    weight = weight * keep + share;
    before = xs[i];
    return sum / weight;
  });
}

// The least and the greatest of what is between two places; null where there is nothing.
export function extent(xs, ys, low, high, positive = false) {
  let least = Infinity, most = -Infinity;
  for (let i = 0; i < ys.length; i++) {
    const y = ys[i];
    if (y === null || !Number.isFinite(y) || xs[i] < low || xs[i] > high || (positive && y <= 0)) continue;
    if (y < least) least = y;
    if (y > most) most = y;
  }
  return least > most ? null : [least, most];
}

// The index of the point nearest to x; -1 of an empty list.
export function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low < xs.length ? low : -1;
}
