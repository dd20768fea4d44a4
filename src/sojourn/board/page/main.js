// The board: which page is shown, and what is around it: navigation, language, theme, connection.
import { onConnection, openSession } from "./api.js";
import { h, icon } from "./dom.js";
import * as format from "./format.js";
import { choose, current, t, translate } from "./i18n.js";
import { startLive } from "./live.js";
import { changeTaskLanguage, drawTasks, setUpTasks } from "./tasks.js";
import { currentTheme, setTheme } from "./theme.js";
import { showCompare } from "./compare_page.js";
import { showArtefact, showData } from "./data_page.js";
import { showNew } from "./new_page.js";
import { showPlan } from "./plan_page.js";
import { showRun } from "./run_page.js";
import { showRuns } from "./runs_page.js";

const $ = (id) => document.getElementById(id);
const THEMES = ["auto", "light", "dark"];

// Each draws into an element and answers how to leave it. `side`: the entry of the navigation.
const PAGES = {
  runs: { show: showRuns, side: "runs", title: () => t("nav_runs") },
  run: { show: showRun, side: "runs", title: (id) => id },
  compare: { show: showCompare, side: "runs", title: () => t("compare") },
  new: { show: showNew, side: "new", title: () => t("nav_new") },
  plan: { show: showPlan, side: "plan", title: () => t("nav_plan") },
  data: { show: (root, name) => (name ? showArtefact(root, name) : showData(root)), side: "data", title: (name) => name || t("nav_data") },
};

let leave = () => {};

function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  const page = PAGES[name] ?? PAGES.runs, argument = rest.join("/").split("?")[0];
  leave();
  const root = h("div", { class: `page ${name || "runs"}` });
  $("page").replaceChildren(root);
  const names = argument.split(",").map(safelyDecoded), whole = names.join(",");
  leave = page.show(root, whole, names) ?? (() => {});
  document.title = `${page.title(whole)} · Sojourn`;
  for (const link of $("nav").querySelectorAll("a")) {
    if (link.dataset.page === page.side) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function safelyDecoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function drawAround() {
  translate();
  $("language-name").textContent = current() === "zh" ? "English" : "中文";
  $("theme-name").textContent = t(`theme_${currentTheme()}`);
  drawTasks();
}

function showConnection(error, seconds) {
  $("connection").hidden = !error;
  if (error) $("connection").textContent = t("board_gone", { time: format.duration(seconds) });
}

async function setUp() {
  for (const element of document.querySelectorAll("[data-icon]")) element.prepend(icon(element.dataset.icon));
  setTheme(currentTheme());
  setUpTasks();
  drawAround();
  onConnection(showConnection);
  $("language").addEventListener("click", () => {
    choose(current() === "zh" ? "en" : "zh");
    drawAround();
    changeTaskLanguage();
    route();
  });
  $("theme").addEventListener("click", () => {
    setTheme(THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length]);
    drawAround();
  });
  window.addEventListener("hashchange", () => {
    if (!location.hash.startsWith("#/")) return; // the link to the main part
    route();
    $("main").scrollTop = 0;
    $("main").focus({ preventScroll: true });
  });
  openSession().catch(() => {});
  startLive();
  route();
}

setUp();
