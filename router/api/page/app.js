// The page itself: polls the router every two seconds, keeps its responses, and redraws the open view.

import { Refused, ask, keep, key } from "./asking.js";
import { byId, h, keyed, say } from "./draw.js";
import { health, modelNames, ofModel, parts, remember } from "./figures.js";
import { Overview } from "./overview.js";
import { Playground } from "./playground.js";
import { Reference } from "./reference.js";
import { Requests } from "./requests.js";
import { Workers } from "./workers.js";

const EVERY_MS = 2000, LOST_AFTER_MS = 7000, CHOSEN = "baton-model";

const state = {
  whole: null, // the latest response of /api/status
  wholeBefore: null, // the previous one
  chosen: sessionStorage.getItem(CHOSEN) || "", // the release of the shown model; empty: all models
  choose,
  status: null, // the part of the latest response that concerns the shown model
  before: null, // the same part of the previous one
  models: [], // all models
  slots: new Map(), // the last hour, by slot
  slotS: 10,
  bounds: {},
  nowS: 0, // the router's clock at the latest response
  spanS: 300, // the displayed time span
  cards: [], // of the models that the user may request, from /v1/models
  loads: new Map(), // router -> its latest load
  hasOrders: false, // the user may drain, change roles and scale
};
const views = { overview: new Overview(), requests: new Requests(), workers: new Workers(), playground: new Playground(), api: new Reference() };
let cardsOf = null; // the models for which the cards were asked
let open = null, lastAnswerMs = null, reason = "", refusedStatus = 0;

function show() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const view = views[name] || views.overview, shown = views[name] ? name : "overview";
  if (open !== view) {
    open?.close?.();
    open = view;
    byId("view").replaceChildren(view.element);
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${shown}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.querySelector("nav a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  byId("span").parentElement.hidden = shown !== "overview";
  view.open?.(rest.map(decodeURIComponent).join("/"), state);
  draw();
}

// Shows one model, or all of them.
function choose(release) {
  if (release === state.chosen) return;
  state.chosen = release;
  if (release) sessionStorage.setItem(CHOSEN, release);
  else sessionStorage.removeItem(CHOSEN);
  state.slots = new Map();
  narrow();
  draw();
  again();
}

function narrow() {
  const of = (whole) => whole && ofModel(whole, state.chosen);
  Object.assign(state, { status: of(state.whole), before: of(state.wholeBefore), models: state.whole?.models || [] });
}

function draw() {
  showHead();
  open?.update(state);
}

function showHead() {
  const { status } = state, names = modelNames(state.models), isSeveral = names.length > 1, select = byId("models");
  byId("model").hidden = isSeveral || !names.length;
  say(byId("model"), names[0]?.name || "");
  select.hidden = !isSeveral;
  keyed(select, [{ release: "", name: `all ${names.length} models` }, ...names], (each) => each.release, ({ release }) => h("option", { value: release }), (option, { name }) => say(option, name));
  if (select.value !== state.chosen) select.value = state.chosen;
  if (status) {
    const found = health(parts(status), status.alerts);
    const pill = byId("health");
    pill.hidden = false;
    if (pill.dataset.text !== found.text + found.level) {
      pill.dataset.text = found.text + found.level;
      pill.className = `pill ${found.level}`;
      pill.replaceChildren(h("span", { class: "dot" }), h("span", { class: "text" }, found.text));
      pill.title = found.text;
    }
  }
  const isAsked = refusedStatus === 401 || refusedStatus === 403;
  byId("key-button").hidden = !isAsked && !key();
  byId("ask").hidden = !(isAsked && !isPatient()) && !isAskOpen;
  byId("forget").hidden = !key();
  say(byId("ask-reason"), !key() ? "" : refusedStatus === 403 ? "This key has no operator rights." : refusedStatus === 401 ? "This key is unknown." : "This key works.");
}

// Views that work with any tenant's key do not ask for an operator's key.
const isPatient = () => (open === views.playground && refusedStatus === 403) || open === views.api;
let isAskOpen = false;

function showAge() {
  if (lastAnswerMs === null && !reason) return;
  const isLost = !refusedStatus && (lastAnswerMs === null || Date.now() - lastAnswerMs > LOST_AFTER_MS);
  const at = lastAnswerMs === null ? "" : new Date(lastAnswerMs).toLocaleTimeString();
  say(byId("lost"), isLost ? `The router does not answer (${reason || "no response yet"}). ${at && `The data is from ${at}.`}` : "");
  byId("lost").hidden = !isLost;
  document.title = isLost ? "Baton: connection lost" : `Baton${state.status?.models.length === 1 ? ` · ${state.status.models[0].id}` : ""}`;
}

async function look() {
  const { chosen } = state, of = chosen ? `&model=${encodeURIComponent(chosen)}` : "";
  const since = Math.max(0, ...state.slots.keys()) - 6; // other routers still write to the latest slots
  const noModel = (error) => {
    if (!chosen || error.status !== 404) throw error;
    return null;
  };
  const [status, history] = await Promise.all([ask("api/status"), ask(`api/history?since=${since > 0 ? since : 0}${of}`).catch(noModel)]);
  if (state.chosen !== chosen) return; // the user has chosen another model since, which is asked for already
  Object.assign(state, { whole: status, wholeBefore: state.whole });
  if (!history || (chosen && !status.models.some((each) => each.release === chosen))) {
    choose(""); // the model is no longer served
    return;
  }
  narrow();
  if (status.load) state.loads.set(status.router, status.load);
  state.hasOrders = status.takes_orders && Boolean(key());
  state.nowS = history.now_s;
  state.slotS = history.slot_s;
  state.bounds = history.bounds;
  state.slots = remember(state.slots, history);
  const ids = status.models.map((each) => each.id).sort().join("\n");
  if (ids !== cardsOf) [state.cards, cardsOf] = [(await ask("v1/models")).data, ids];
  await open?.look?.(state);
}

let timer = 0;
async function again() {
  clearTimeout(timer);
  try {
    await look();
    lastAnswerMs = Date.now();
    refusedStatus = 0;
    reason = "";
  } catch (error) {
    refusedStatus = error instanceof Refused && [401, 403].includes(error.status) ? error.status : 0;
    reason = error.name === "TimeoutError" ? "timeout" : error.message;
    if (refusedStatus) {
      state.whole = state.wholeBefore = null;
      narrow();
      state.loads.clear();
    }
    if (refusedStatus === 403 && !state.cards.length) state.cards = await ask("v1/models").then((answer) => answer.data, () => []);
  }
  draw();
  showAge();
  timer = setTimeout(again, document.hidden ? 5 * EVERY_MS : EVERY_MS);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keep(byId("key").value.trim());
  byId("key").value = "";
  isAskOpen = false;
  again();
});
byId("forget").addEventListener("click", () => {
  keep("");
  isAskOpen = false;
  again();
});
byId("key-button").addEventListener("click", () => {
  isAskOpen = byId("ask").hidden;
  showHead();
  if (isAskOpen) byId("key").focus();
});
byId("models").addEventListener("change", () => choose(byId("models").value));
byId("span").addEventListener("change", () => {
  state.spanS = Number(byId("span").value);
  draw();
});

const THEMES = { "": ["◐", "system default"], light: ["☀", "light"], dark: ["☾", "dark"] };
function useTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  say(byId("theme"), THEMES[name][0]);
  byId("theme").setAttribute("aria-label", `Colours: ${THEMES[name][1]}`);
  byId("theme").title = `Colours: ${THEMES[name][1]}`;
  views.overview.redraw();
}
byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES), name = names[(names.indexOf(document.documentElement.dataset.theme || "") + 1) % names.length];
  localStorage.setItem("baton-theme", name);
  useTheme(name);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => views.overview.redraw());
useTheme(THEMES[localStorage.getItem("baton-theme")] ? localStorage.getItem("baton-theme") : "");

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => document.hidden || again());
setInterval(showAge, 1000);
show();
again();
