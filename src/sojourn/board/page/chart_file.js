// A chart as a file: SVG that opens anywhere, or PNG made from it.
import { h, svg } from "./dom.js";

const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-opacity", "opacity", "font-size", "font-family", "font-weight"];
const HEAD = 44, SCALE = 2;

// legend: [{ name, color, dashed }]. With the colours that are on the screen now.
function standalone(chart, legend) {
  const width = chart.width, height = chart.height + HEAD, page = getComputedStyle(document.body);
  const copy = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
  copy.append(svg("rect", { width, height, fill: page.backgroundColor }));
  const font = { "font-family": page.fontFamily, fill: page.color };
  copy.append(svg("text", { x: 12, y: 20, "font-size": 14, "font-weight": 600, ...font }, chart.title));
  let x = 12;
  for (const { name, color, dashed } of legend) {
    const stroke = getComputedStyle(chart.svg.querySelector(`.line.c${color}`) ?? chart.svg).stroke;
    copy.append(svg("line", { x1: x, x2: x + 14, y1: 33, y2: 33, stroke, "stroke-width": 2, "stroke-dasharray": dashed ? "3 2" : null }), svg("text", { x: x + 19, y: 37, "font-size": 11, ...font }, name));
    x += 34 + name.length * 6.5;
  }
  const plot = chart.svg.cloneNode(true), inner = svg("g", { transform: `translate(0 ${HEAD})` });
  const originals = [...chart.svg.querySelectorAll("*")];
  [...plot.querySelectorAll("*")].forEach((element, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of KEPT) element.setAttribute(name, style.getPropertyValue(name));
    element.removeAttribute("class");
  });
  inner.append(...plot.childNodes);
  copy.append(inner);
  return new XMLSerializer().serializeToString(copy);
}

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 2000);
}

export function saveSvg(chart, name, legend) {
  save(`${name}.svg`, new Blob([standalone(chart, legend)], { type: "image/svg+xml" }));
}

export async function savePng(chart, name, legend) {
  const address = URL.createObjectURL(new Blob([standalone(chart, legend)], { type: "image/svg+xml" }));
  const image = new Image();
  image.src = address;
  await image.decode();
  const canvas = h("canvas", { width: image.width * SCALE, height: image.height * SCALE });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(address);
  save(`${name}.png`, await new Promise((resolve) => canvas.toBlob(resolve, "image/png")));
}
