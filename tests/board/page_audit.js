// Run inside a page: each function answers what is wrong with it. See page_audit.py.

// Texts below 4.5 : 1, or 3 : 1 where they are large (WCAG 2.2, 1.4.3). Hidden and disabled ones do not count.
function lowContrast() {
  const parse = (text) => {
    const numbers = (text.match(/-?[\d.]+(e-?\d+)?/g) ?? []).map(Number);
    if (text.startsWith("color(")) return [...numbers.slice(0, 3).map((one) => one * 255), numbers[3] ?? 1];
    return [...numbers.slice(0, 3), numbers[3] ?? 1];
  };
  const over = (top, below) => below.map((one, i) => (i === 3 ? 1 : top[i] * top[3] + one * (1 - top[3])));
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((one) => one / 255).map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ratio = (one, other) => { const [a, b] = [light(one), light(other)]; return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };
  const ground = (element) => {
    const path = [];
    for (let one = element; one; one = one.parentElement) path.unshift(parse(getComputedStyle(one).backgroundColor));
    return path.reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const opacity = (element) => { let all = 1; for (let one = element; one; one = one.parentElement) all *= Number(getComputedStyle(one).opacity); return all; };
  const wrong = [], seen = new Set();
  const check = (element, style, text) => {
    const below = ground(element), colour = parse(element instanceof SVGElement ? style.fill : style.color);
    const shown = over([...colour.slice(0, 3), colour[3] * opacity(element)], below);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const found = ratio(shown, below);
    if (found < (large ? 3 : 4.5)) wrong.push(`${found.toFixed(2)} ${element.tagName}.${element.getAttribute("class") ?? ""}: ${text.trim().slice(0, 40)}`);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (element.closest(".hidden, .skip, :disabled, option, title")) continue;
    check(element, getComputedStyle(element), node.textContent);
  }
  for (const input of document.querySelectorAll("[placeholder]")) {
    if (input.checkVisibility() && !input.value) check(input, getComputedStyle(input, "::placeholder"), input.placeholder);
  }
  return [...new Set(wrong)];
}

// One h1, first, and no level left out below it.
function wrongHeadings() {
  const levels = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].filter((one) => one.checkVisibility() && !one.closest("dialog, #tasks"));
  const numbers = levels.map((one) => Number(one.tagName[1]));
  const wrong = numbers.filter((one) => one === 1).length === 1 && numbers[0] === 1 ? [] : [`first headings: ${numbers.slice(0, 3)}`];
  numbers.forEach((one, i) => i && one > numbers[i - 1] + 1 && wrong.push(`h${numbers[i - 1]} then h${one}: ${levels[i].textContent}`));
  return wrong;
}

// How many controls Tab should reach.
function findTabbable() {
  const all = "a[href], button:not(:disabled), input:not(:disabled), select:not(:disabled), textarea, summary, [tabindex]";
  const inside = document.querySelector("dialog[open]") ?? document;
  window.tabbable = [...inside.querySelectorAll(all)].filter((one) => one.tabIndex >= 0 && one.checkVisibility({ visibilityProperty: true }));
  document.activeElement?.blur();
  return window.tabbable.length;
}

// Which of them has the focus (-1: none), whether one sees it, and its HTML.
function focus() {
  const one = document.activeElement, style = getComputedStyle(one);
  const shown = (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1) || style.boxShadow !== "none";
  return [window.tabbable.indexOf(one), shown, one.outerHTML.slice(0, 120)];
}
