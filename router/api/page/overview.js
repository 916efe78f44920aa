// Overview of the whole cluster: its health, latency and current work.

import { Chart, h, heading, keyed, outcomeName, say, stageClass, stageName, stateClass, width } from "./draw.js";
import { Models } from "./models.js";
import { alertLines, figure, latencyText, loadFigures, overview, parts, percent, promptClasses, rateOfBytes, rates, short, tick, title, workerKey } from "./figures.js";

export class Overview {
  constructor() {
    this.parts = h("dl", { class: "parts" });
    this.tiles = ["Goodput", "In time", "First token, p50 · p99", "Prompt tokens from cache"].map((name) => {
      const value = h("span", {}, "–"), more = h("small");
      return { value, more, element: h("section", { class: "card w3" }, heading(name), h("div", { class: "big" }, value, more)) };
    });
    this.lengths = h("ul", { class: "lengths", "aria-label": "Time to first token by uncached prompt tokens" });
    this.tiles[2].element.append(this.lengths);
    for (const tile of this.tiles.slice(2)) tile.element.classList.add("split"); // full width on a narrow page
    this.alerts = h("ul", { class: "alerts" });
    this.alertCard = h("section", { class: "card w12", "aria-label": "Alerts" }, heading("Alerts"), this.alerts);
    this.models = new Models();
    this.loads = h("tbody");
    this.loadHead = h("tr", {}, h("th", { scope: "col" }, "router"));
    this.prompts = h("select", { "aria-label": "Prompt tokens to compute", onchange: () => this.update(this.state) }, h("option", { value: "" }, "all prompts"));
    this.requests = new Chart("Requests per second", [
      { name: "offered", colour: "soft" }, { name: "in time", colour: "good", fill: true }, { name: "refused", colour: "bad" },
    ]);
    this.ttft = new Chart("Time to first token", [{ name: "p50", colour: "prefill" }, { name: "p99", colour: "decode" }], { isLog: true, control: this.prompts });
    this.itl = new Chart("Time between tokens", [{ name: "p50", colour: "prefill" }, { name: "p99", colour: "decode" }], { isLog: true });
    this.tokens = new Chart("Tokens per second", [{ name: "prompt", colour: "prefill" }, { name: "generated", colour: "decode", fill: true }]);
    this.charts = [this.requests, this.ttft, this.itl, this.tokens];
    this.routers = h("ul", { class: "routers", "aria-label": "Routers" });
    this.prefill = h("ul", { class: "prefill", "aria-label": "Prefill workers" });
    this.decode = h("ul", { class: "decode", "aria-label": "Decode workers" });
    this.computed = wire();
    this.kv = wire();
    this.flow = h("section", { class: "card w12" }, heading("Where work is now"),
      h("div", { class: "flow" }, this.routers, this.computed.element, this.prefill, this.kv.element, this.decode));
    this.misses = h("div", { class: "stack" });
    this.classes = h("tbody");
    const columns = [["class"], ["in time", "number"], ["in time per second", "number"], ["objectives"], ["other outcomes"]];
    this.element = h("div", { class: "grid" },
      h("section", { class: "card w12", "aria-label": "Health" }, this.parts), this.alertCard, this.models.element,
      this.tiles.map((tile) => tile.element), this.requests.element, this.ttft.element, this.flow, this.itl.element, this.tokens.element,
      h("section", { class: "card w5" }, heading("Missed objectives by stage to blame"), this.misses),
      h("section", { class: "card w7" }, heading("Service classes"),
        h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Service classes" }, h("table", { class: "cards" },
          h("thead", {}, h("tr", {}, columns.map(([name, kind = ""]) => h("th", { scope: "col", class: kind }, name)))), this.classes))),
      h("section", { class: "card w12" }, heading("Routers' own load"), h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Routers' own load" },
        h("table", { class: "cards" }, h("thead", {}, this.loadHead), this.loads))));
  }

  redraw() {
    for (const chart of this.charts) chart.draw();
  }

  update(state) {
    const { status } = state;
    this.state = state;
    if (!status) {
      this.element.hidden = true;
      return;
    }
    this.element.hidden = false;
    this.showParts(status, state.cards);
    this.models.update(state);
    this.showAlerts(status);
    keyed(this.prompts, [{ id: "", name: "all prompts" }, ...promptClasses(state.bounds)], (each) => each.id,
      ({ id, name }) => h("option", { value: id }, id ? `${name} tokens` : name), () => {});
    const seen = overview(state.slots, { ...state, prompts: this.prompts.value });
    this.showTiles(seen);
    this.showLengths(seen.lengths);
    this.showLoads(state);
    this.showCharts(seen, status.slo_classes);
    this.showFlow(state, seen.now);
    this.showMisses(seen);
    this.showClasses(seen, status.slo_classes);
  }

  showParts(status, cards) {
    const lengthOf = (model) => cards.find((card) => card.id === model.id)?.max_model_len;
    const modelPart = (status.models.length > 1 ? [] : status.models).map((each) => ({
      name: "Model", level: "good", value: each.id, more: lengthOf(each) ? `${figure(lengthOf(each), 0)} tokens` : "",
    }));
    keyed(this.parts, [...modelPart, ...parts(status)], (part) => part.name,
      (part) => h("div", {}, h("dt", {}, part.name), h("dd", {}, h("span", { class: "dot" }), h("span", { class: "wrap" }), h("small", { class: "wrap" }))),
      (element, part) => {
        const [dot, value, more] = element.lastElementChild.children;
        dot.className = `dot ${part.level}`;
        dot.hidden = ["Model", "Version"].includes(part.name);
        say(value, part.value, part.level === "good" ? "wrap" : `wrap ${part.level}`);
        say(more, part.more);
      });
  }

  showAlerts(status) {
    const lines = alertLines(status.alerts || [], status.now_s);
    this.alertCard.hidden = !lines.length;
    keyed(this.alerts, lines, (line) => line.key,
      () => h("li", {}, h("span", { class: "chip" }), h("div", {}, h("div", { class: "strong wrap" }), h("div", { class: "soft small wrap" }, h("span"), " · ", h("code")))),
      (element, { level, word, summary, lasts, page }) => {
        const [chip, text] = element.children, [said, more] = text.children;
        say(chip, word, `chip ${level}`);
        say(said, summary);
        say(more.firstElementChild, lasts);
        say(more.lastElementChild, page);
      });
  }

  showLengths(lengths) {
    keyed(this.lengths, lengths.filter((each) => each.count), (each) => each.id, () => h("li", {}, h("span"), h("b")),
      (element, { name, count, p50, p99 }) => {
        say(element.firstElementChild, `${name} tokens`);
        say(element.lastElementChild, `${latencyText(p50)} · ${latencyText(p99)}`);
        element.title = `${figure(count, 0)} prompts with ${name} tokens that had to be computed`;
      });
  }

  showLoads({ status, loads }) {
    const blank = [...loads.values()].map(loadFigures)[0] || [];
    keyed(this.loadHead, [{ name: "router" }, ...blank], (each) => each.name, ({ name }) => h("th", { scope: "col", class: name === "router" ? "" : "number" }, name), () => {});
    keyed(this.loads, status.routers, (router) => router.id,
      ({ id }) => h("tr", {}, h("th", { scope: "row", class: "strong whole" }, id), blank.map(({ name }) => h("td", { class: "number", "data-label": name }, "–"))),
      (row, { id }) => loads.has(id) && loadFigures(loads.get(id)).forEach(({ value, level }, i) => say(row.children[i + 1], value, `number ${level}`)));
  }

  showTiles(seen) {
    const [goodput, inTime, first, cache] = this.tiles;
    const { total } = seen;
    say(goodput.value, short(seen.goodput));
    say(goodput.more, `requests/s of ${short(seen.offered)} offered`);
    const level = seen.attainment === null ? "" : seen.attainment >= 0.99 ? "good" : seen.attainment >= 0.9 ? "warn" : "bad";
    say(inTime.value, percent(seen.attainment), level);
    say(inTime.more, total.ended ? `${figure(total.met, 0)} of ${figure(total.ended, 0)} requests` : "no requests");
    say(first.value, `${latencyText(seen.ttft.p50)} · ${latencyText(seen.ttft.p99)}`);
    say(first.more, `whole response ${latencyText(seen.duration.p50)} · ${latencyText(seen.duration.p99)}`);
    say(cache.value, percent(seen.hits));
    say(cache.more, seen.ceiling === null ? "" : `of ${percent(seen.ceiling)} seen before`);
  }

  showCharts({ lines, total, first, itl, tokens, seconds }, classes) {
    const marks = (name) => {
      const byValue = {};
      for (const [of, objectives] of Object.entries(classes)) if (objectives[name] !== null) (byValue[objectives[name]] ||= []).push(of);
      return Object.entries(byValue).map(([value, names]) => ({ value: Number(value), name: `objective of ${names.join(", ")}` }));
    };
    const counts = [total.offered, total.met, total.refused].map((count) => `${figure(count, 0)} in total`);
    this.requests.show([lines.at, lines.offered, lines.met, lines.refused], [], counts);
    this.ttft.show([lines.at, lines.ttftP50, lines.ttftP99], marks("ttft_s"), [first.p50, first.p99].map(latencyText));
    this.itl.show([lines.at, lines.itlP50, lines.itlP99], marks("itl_s"), [itl.p50, itl.p99].map(latencyText));
    const mean = (count) => (seconds > 0 ? `${short(count / seconds)}/s on average` : "–");
    this.tokens.show([lines.at, lines.prompt, lines.generated], [], [mean(tokens.prompt), mean(tokens.generated)]);
  }

  showFlow(state, now) {
    const { status, before } = state;
    const asked = rates(before, status, "routers", (router) => router.met + router.missed + router.rejected);
    const computed = rates(before, status, "workers", (worker) => worker.computed_tokens);
    keyed(this.routers, status.routers, (router) => router.id,
      () => h("li", {}, h("div", { class: "title" }, h("span", { class: "wrap" })), h("div", { class: "facts" })),
      (element, router) => {
        say(element.firstElementChild.firstElementChild, router.id);
        say(element.lastElementChild, `${asked[router.id] === null ? "–" : short(asked[router.id])} requests/s`);
      });
    for (const [list, role] of [[this.prefill, "prefill"], [this.decode, "decode"]]) {
      const workers = status.workers.filter((worker) => worker.role === role);
      keyed(list, workers.length ? workers : [{ id: `no ${role} worker`, isNone: true }], workerKey, workerNode,
        (element, worker) => showWorker(element, worker, computed[workerKey(worker)], status.models.length > 1));
    }
    this.computed.show(now.promptPerS, `${short(now.promptPerS)} prompt tokens/s`);
    this.kv.show(now.kvPerS, `${rateOfBytes(now.kvPerS)} of KV`);
  }

  showMisses({ misses, total }) {
    const items = misses.length ? misses : [{ stage: "", count: 0 }];
    keyed(this.misses, items, (each) => each.stage,
      ({ stage }) => (stage ? h("div", { class: "bar" }, h("span", {}, title(stageName(stage))), h("div", {}, h("i", { class: stageClass(stage) })), h("span"))
        : h("p", { class: "soft" })),
      (element, { stage, count, share }) => {
        if (!stage) {
          say(element, total.ended ? "Every answered request met its objectives." : "No requests in this period.");
          return;
        }
        width(element.children[1].firstElementChild, share);
        say(element.children[2], `${figure(count, 0)} · ${percent(share)}`);
      });
  }

  showClasses({ classes }, objectives) {
    const items = classes.length ? classes : Object.keys(objectives).map((name) => ({ name, ended: 0, attainment: null, perS: null, others: {} }));
    keyed(this.classes, items, (each) => each.name,
      () => h("tr", {}, h("th", { scope: "row", class: "strong" }), h("td", { class: "number", "data-label": "in time" }), h("td", { class: "number whole", "data-label": "in time per second" }),
        h("td", { class: "whole", "data-label": "objectives" }), h("td", { class: "break whole", "data-label": "other outcomes" })),
      (row, each) => {
        const [name, inTime, perS, wanted, others] = row.children, of = objectives[each.name];
        say(name, each.name);
        say(inTime, percent(each.attainment));
        say(perS, short(each.perS));
        say(wanted, of ? [["first token", of.ttft_s], ["gap", of.itl_s], ["whole", of.e2e_s]].filter(([, s]) => s !== null).map(([what, s]) => `${what} ${tick(s)}`).join(", ") : "set by the request");
        say(others, Object.entries(each.others).map(([outcome, count]) => `${figure(count, 0)} ${outcomeName(outcome)}`).join(", ") || "–");
      });
  }
}

function wire() {
  const label = h("span"), svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(svg.namespaceURI, "line");
  for (const [name, value] of Object.entries({ x1: "0", y1: "50%", x2: "100%", y2: "50%" })) line.setAttribute(name, value);
  svg.append(line);
  const narrow = matchMedia("(max-width: 1000px)");
  const turn = () => {
    const ends = narrow.matches ? { x1: "50%", y1: "0", x2: "50%", y2: "100%" } : { x1: "0", y1: "50%", x2: "100%", y2: "50%" };
    for (const [name, value] of Object.entries(ends)) line.setAttribute(name, value);
  };
  narrow.addEventListener("change", turn);
  turn();
  return {
    element: h("div", { class: "wire" }, label, svg),
    show(perS, text) {
      say(label, text);
      line.setAttribute("class", perS > 0 ? "moves" : "");
    },
  };
}

function workerNode(worker) {
  if (worker.isNone) return h("li", { class: "soft" }, worker.id);
  return h("li", {}, h("div", { class: "title" }, h("span", { class: "wrap" }), h("span")), h("div", { class: "facts" }), h("div", { class: "facts" }),
    h("div", { class: "meter", "aria-hidden": "true" }, h("i"), h("i", { class: "cached" })));
}

function showWorker(element, worker, perS, isNamed) {
  if (worker.isNone) return;
  const [head, work, memory, meter] = element.children, { blocks } = worker;
  say(head.firstElementChild, isNamed ? workerKey(worker) : worker.id);
  const isWell = worker.self_check === "ok";
  say(head.lastElementChild, isWell ? worker.state : "self-check failed", `small ${isWell ? stateClass(worker.state) : "bad"}`);
  say(work, `${worker.running} running · ${worker.waiting} waiting · ${short(perS)} tokens/s`);
  const used = blocks.total ? blocks.in_use / blocks.total : 0, cached = blocks.total ? blocks.cached / blocks.total : 0;
  say(memory, `KV ${percent(used)} in use, ${percent(cached)} cached`);
  width(meter.firstElementChild, used);
  width(meter.lastElementChild, cached);
}
