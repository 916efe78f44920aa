// Elements, charts and dialogs, shared by all views.

import { duration, figure, lone, short, tick } from "./figures.js";

export const byId = (id) => document.getElementById(id);

// Creates an element. attributes: class, on* listeners, dataset as data-*, properties such as value; null is omitted.
export function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name in made && !name.startsWith("aria")) made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Sets a text only if it changes, so that a selection stays and screen readers read nothing twice.
export function say(element, text, className) {
  if (element.textContent !== text) element.textContent = text;
  if (className !== undefined && element.className !== className) element.className = className;
}

// Reuses the children of an element from response to response, so that focus and open menus stay.
export function keyed(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = old.get(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    old.delete(name);
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const child of old.values()) child.remove();
}

export const width = (element, share) => {
  element.style.width = `${Math.max(0, Math.min(100, 100 * (share || 0)))}%`;
  return element;
};

export const STAGES = ["queue", "decode_admission", "prefill", "transfer", "decode", "recovery"];
export const stageClass = (stage) => (stage === "prefill" || stage === "decode" ? `s-${stage}` : stage);
export const stageName = (stage) => ({ decode_admission: "admission" })[stage] || stage;

// Creates a bar of a request's stages. seconds: {queue: 0.1, ...}.
export function stageBar(seconds, isTall = false) {
  const all = STAGES.reduce((sum, stage) => sum + (seconds[stage] || 0), 0);
  const said = STAGES.filter((stage) => seconds[stage] > 0).map((stage) => `${stageName(stage)} ${duration(seconds[stage])}`).join(", ");
  const bar = h("div", { class: isTall ? "stages tall" : "stages", role: "img", "aria-label": said || "no stages yet", title: said });
  for (const stage of STAGES) if (seconds[stage] > 0) bar.append(width(h("i", { class: stageClass(stage) }), seconds[stage] / all));
  return bar;
}

export function stageLegend(seconds) {
  return h("div", { class: "legend" }, STAGES.map((stage) =>
    h("span", {}, h("i", { class: `swatch stage ${stageClass(stage)}` }), stageName(stage), seconds ? h("b", {}, duration(seconds[stage])) : null)));
}

const OUTCOMES = {
  running: ["running", "soft"], met: ["in time", "good"], ttft_missed: ["late first token", "warn"], itl_missed: ["slow tokens", "warn"],
  e2e_missed: ["late completion", "warn"], error: ["error", "bad"], rejected: ["refused", "bad"], limited: ["over its limit", "bad"],
  invalid: ["invalid", "soft"], cancelled: ["cancelled", "soft"],
};
export const outcomeName = (outcome) => OUTCOMES[outcome]?.[0] || outcome;
export const outcomeChip = (outcome) => h("span", { class: `chip ${OUTCOMES[outcome]?.[1] || ""}` }, outcomeName(outcome));
export const stateClass = (state) => ({ ready: "good", dead: "bad" })[state] || "warn";

// Returns the current value of a colour of style.css, for canvases.
export function colour(name) {
  const probe = h("i", { hidden: true });
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const LABEL_FONT = "11px system-ui, sans-serif";

// A chart over time. lines: [{name, colour, fill}]; isLog: seconds on a logarithmic axis; otherwise a rate per second,
// starting at 0. control: an element next to the title.
export class Chart {
  constructor(title, lines, { isLog = false, control = null } = {}) {
    this.lines = lines;
    this.isLog = isLog;
    this.marks = [];
    this.texts = lines.map(() => "–");
    this.when = h("span", { class: "mono" });
    this.place = h("div", { class: "chart", role: "img" });
    this.legend = h("div", { class: "legend" }, this.when, lines.map((line) => {
      const mark = h("i", { class: "swatch" });
      mark.style.color = `var(--${line.colour})`;
      line.shown = h("b", {}, "–");
      return h("span", {}, mark, line.name, line.shown);
    }), this.objectives = h("span", { hidden: true }));
    this.element = h("section", { class: "card charted w6" }, h("div", { class: "head" }, h("div", { class: "row" }, h("h2", {}, title), control), this.legend), this.place);
    this.title = title;
    this.data = [[], ...lines.map(() => [])];
    new ResizeObserver(() => this.fit()).observe(this.place);
  }

  // marks: [{value, name}], drawn as dashed lines. texts: the texts of the legend, one per line.
  show(data, marks, texts) {
    this.data = data;
    const changed = JSON.stringify(marks) !== JSON.stringify(this.marks);
    this.marks = marks;
    this.texts = texts;
    if (!this.isPointed) texts.forEach((text, i) => say(this.lines[i].shown, text));
    this.objectives.hidden = !marks.length;
    say(this.objectives, marks.length ? `┄ objective ${marks.map((mark) => tick(mark.value)).join(", ")}` : "");
    this.place.setAttribute("aria-label", `${this.title}: ${this.lines.map((line, i) => `${line.name} ${texts[i]}`).join(", ")}`);
    if (this.plot && !changed) this.plot.setData(data);
    else this.draw();
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.place.clientWidth || !this.data[0].length) return;
    const soft = colour("soft"), edge = colour("edge"), accent = colour("warn");
    const axis = { stroke: soft, font: LABEL_FONT, grid: { stroke: edge, width: 1 }, ticks: { show: false } };
    const round = (each) => (!this.isLog || Math.abs(Math.log10(each) % 1) < 1e-6 || Math.abs(Math.log10(each) % 1) > 1 - 1e-6 ? each : null);
    const colours = this.lines.map((line) => colour(line.colour));
    const options = {
      width: this.place.clientWidth, height: this.place.clientHeight, padding: [8, 18, 0, 0],
      legend: { show: false }, cursor: { y: false, points: { size: 6 }, drag: { setScale: false } },
      series: [{}, ...this.lines.map((line, i) => ({
        stroke: colours[i], width: 1.75, fill: line.fill ? faded(colours[i]) : undefined, spanGaps: false,
        points: { show: true, size: 5, fill: colours[i], filter: (plot, series) => lone(plot.data[series]) },
      }))],
      scales: { x: { time: true }, y: this.isLog ? { distr: 3, range: (_, low, high) => this.logRange(low, high) } : { range: (_, low, high) => [0, niceTop(high)] } },
      axes: [
        { ...axis, size: 28, space: 66, incrs: [10, 30, 60, 120, 300, 600, 900, 1800], values: (_, ticks) => ticks.map((each) => clock(each)) },
        { ...axis, size: this.isLog ? 54 : 44, space: 28, grid: { ...axis.grid, filter: (_, splits) => splits.map(round) }, filter: (_, splits) => splits.map(round),
          values: (_, ticks) => ticks.map((each) => (each === null ? "" : this.isLog ? tick(each) : String(+each.toPrecision(3)))) },
      ],
      hooks: { draw: [(plot) => this.drawMarks(plot, accent)], setCursor: [(plot) => this.point(plot)] },
    };
    this.plot = new uPlot(options, this.data, this.place);
  }

  logRange(low, high) {
    const values = [low, high, ...this.marks.map((mark) => mark.value)].filter((value) => value > 0);
    if (!values.length) return [0.01, 10];
    return [10 ** Math.floor(Math.log10(Math.min(...values))), 10 ** Math.ceil(Math.log10(1.01 * Math.max(...values)))];
  }

  drawMarks(plot, stroke) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = stroke;
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.lineWidth = 1.25 * devicePixelRatio;
    ctx.font = `${10.5 * devicePixelRatio}px system-ui, sans-serif`;
    for (const { value, name } of this.marks) {
      const y = Math.round(plot.valToPos(value, "y", true));
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.fillText(name, bbox.left + 6 * devicePixelRatio, y - 4 * devicePixelRatio);
    }
    ctx.restore();
  }

  // The legend shows the values under the pointer, or else the given texts.
  point(plot) {
    const i = plot.cursor.idx, isOver = i !== null && i !== undefined && plot.cursor.left >= 0;
    this.isPointed = isOver;
    say(this.when, isOver ? clock(this.data[0][i], true) : "");
    this.lines.forEach((line, n) => say(line.shown, isOver ? this.text(this.data[n + 1][i]) : this.texts[n]));
  }

  text(value) {
    return this.isLog ? duration(value) : `${figure(value ?? null, 2)}/s`;
  }

  fit() {
    if (!this.plot) this.draw();
    else this.plot.setSize({ width: this.place.clientWidth, height: this.place.clientHeight });
  }
}

const faded = (rgb) => rgb.replace(/^rgb\(/, "rgba(").replace(/\)$/, ", .13)");
function niceTop(high) {
  if (!(high > 0)) return 1;
  const step = 10 ** Math.floor(Math.log10(high));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((each) => each * step).find((each) => each >= 1.05 * high) ?? 10 * step;
}
export function clock(at, withSeconds = false) {
  const parts = { hour: "2-digit", minute: "2-digit", hour12: false };
  const date = new Date(1000 * at);
  return date.toLocaleTimeString("en-GB", withSeconds || date.getSeconds() ? { ...parts, second: "2-digit" } : parts);
}

// Asks for confirmation. Resolves to true if the user confirms.
export function confirm({ title, text, yes, isDanger }) {
  const dialog = byId("confirm");
  say(byId("confirm-title"), title);
  say(byId("confirm-text"), text);
  say(byId("confirm-yes"), yes, isDanger ? "danger" : "primary");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

let toastTimer = 0;
export function toast(text) {
  say(byId("toast"), text);
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => say(byId("toast"), ""), 6000);
}

export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    toast(`${what} copied`);
  } catch {
    toast("This browser does not allow the page to copy: select the text instead");
  }
}

export const heading = (text) => h("h2", {}, text);
export const named = (list) => h("dl", { class: "facts" }, Object.entries(list).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
export const empty = (text) => h("p", { class: "empty" }, text);
