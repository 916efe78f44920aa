// The latest requests, with the time that each spent in its stages.

import { ask } from "./asking.js";
import { clock, empty, h, heading, keyed, named, outcomeChip, outcomeName, say, stageBar, stageClass, stageLegend, stageName, width } from "./draw.js";
import { age, duration, figure, tick } from "./figures.js";

const KEPT = 200, TRIES = 4; // each router lists only its own requests, and behind one port the next call may reach another router
const FILTERS = {
  "": [], missed: ["ttft_missed", "itl_missed", "e2e_missed"], failed: ["error", "rejected", "limited", "invalid"], running: ["running"],
  met: ["met"], cancelled: ["cancelled"],
};
const COLUMNS = ["", "request", "outcome", "workers, or error", "first token", "total", "tokens in · out", "where the time went"];

export class Requests {
  constructor() {
    this.known = new Map(); // router/tenant/id/arrival -> summary
    this.chosen = "";
    this.release = ""; // of the shown model; empty: all models
    this.detail = null;
    this.problem = "";
    const names = { "": "all outcomes", missed: "late", failed: "failed or refused", running: "running", met: "in time", cancelled: "cancelled" };
    this.outcome = h("select", { onchange: () => this.filter() }, Object.entries(names).map(([value, text]) => h("option", { value }, text)));
    this.slo = h("select", { onchange: () => this.filter() }, h("option", { value: "" }, "all classes"));
    this.tenant = h("input", { size: 12, placeholder: "any", spellcheck: false, onchange: () => this.filter() });
    this.count = h("span", { class: "soft small", role: "status" });
    this.rows = h("tbody");
    this.none = empty("");
    this.side = h("section", { class: "card stack", "aria-label": "One request", hidden: true });
    this.element = h("div", { class: "stack" },
      h("div", { class: "row" },
        h("label", { class: "row" }, h("span", { class: "hidden" }, "Outcome"), this.outcome),
        h("label", { class: "row" }, h("span", { class: "hidden" }, "Class"), this.slo),
        h("label", { class: "row soft" }, "Tenant", this.tenant), this.count),
      this.side,
      h("section", { class: "card", "aria-label": "Latest requests" }, h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "List of requests" },
        h("table", { class: "cards" }, h("thead", {}, h("tr", {}, COLUMNS.map((name, i) => h("th", { scope: "col", class: [4, 5, 6].includes(i) ? "number" : "" }, name || h("span", { class: "hidden" }, "when"))))), this.rows)), this.none));
  }

  open(id) {
    if (id === this.chosen) return;
    this.chosen = id;
    this.detail = null;
    this.shown = "";
    if (id) this.lookAtOne().then(() => this.showDetail());
    else this.showDetail();
  }

  filter() {
    this.known.clear();
    this.look(this.state).then(() => this.update(this.state), () => {});
  }

  // Forgets the requests of the previously shown model.
  use(release) {
    if (this.release !== release) this.known.clear();
    this.release = release;
  }

  async look(state) {
    const { chosen } = state;
    const query = new URLSearchParams({ limit: String(KEPT / 2) });
    for (const outcome of FILTERS[this.outcome.value]) query.append("outcome", outcome);
    if (this.slo.value) query.set("slo_class", this.slo.value);
    if (this.tenant.value.trim()) query.set("tenant", this.tenant.value.trim());
    if (chosen) query.set("model", chosen);
    try {
      const answer = await ask(`api/requests?${query}`);
      if (chosen !== state.chosen) return; // the user has chosen another model since
      this.use(chosen);
      for (const [name, each] of this.known) if (each.router === answer.router) this.known.delete(name);
      for (const each of answer.requests) this.known.set(`${each.router}/${each.tenant}/${each.request_id}/${each.arrived_s}`, each);
      this.problem = "";
    } catch (error) {
      this.problem = error.status === 404 ? "This router's release does not keep a list of requests." : error.message;
      if (error.status !== 404) throw error;
    }
    if (this.chosen && (!this.detail || this.detail.outcome === "running")) await this.lookAtOne();
  }

  async lookAtOne() {
    for (let i = 0; i < TRIES; i++) {
      try {
        [this.detail] = (await ask(`api/requests/${encodeURIComponent(this.chosen)}`)).requests;
        return;
      } catch (error) {
        if (error.status !== 404) throw error;
      }
    }
  }

  update(state) {
    this.state = state;
    this.use(state.chosen);
    this.isNamed = state.models.length > 1;
    if (!state.status) return;
    const classes = Object.keys(state.status.slo_classes);
    keyed(this.slo, ["", ...classes], (name) => name, (name) => h("option", { value: name }, name || "all classes"), () => {});
    const list = [...this.known.values()].sort((a, b) => b.arrived_s - a.arrived_s).slice(0, KEPT);
    say(this.count, this.problem ? "" : `${list.length} shown${state.status.routers.length > 1 ? `, of ${state.status.routers.length} routers` : ""}`);
    this.none.hidden = list.length > 0;
    say(this.none, this.problem || "No requests yet. Send one in the playground.");
    keyed(this.rows, list, (each) => `${each.router}/${each.tenant}/${each.request_id}/${each.arrived_s}`, (each) => this.row(each),
      (row, each) => this.fill(row, each, state.nowS));
    this.showDetail();
  }

  row(each) {
    const link = h("a", { href: `#requests/${encodeURIComponent(each.request_id)}`, class: "mono", title: each.request_id }, brief(each.request_id));
    const model = h("div", { class: "soft small wrap" }, each.release || each.model || "no model");
    return h("tr", {}, h("td", { class: "soft" }), h("th", { scope: "row" }, link, model), h("td"), h("td", { class: "soft break" }), h("td", { class: "number", "data-label": "first" }),
      h("td", { class: "number", "data-label": "total" }), h("td", { class: "number" }), h("td", { class: "whole" }));
  }

  fill(row, each, nowS) {
    const [when, id, outcome, went, first, total, tokens, stages] = row.children;
    if (each.request_id === this.chosen) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
    id.lastElementChild.hidden = !this.isNamed || Boolean(this.release);
    say(when, `${age(Math.max(0, nowS - each.arrived_s))} ago`);
    say(first, duration(each.ttft_s));
    say(total, duration(each.total_s));
    say(tokens, `${figure(each.num_prompt_tokens, 0)} · ${figure(each.num_tokens, 0)}`);
    tokens.title = `${each.num_cached_tokens} of ${each.num_prompt_tokens} prompt tokens from cache`;
    say(went, each.error ? `${isPlaced(each) ? `${way(each)}: ` : ""}${each.error}` : way(each)); // for a rejected body the error names the field
    const version = `${each.outcome}/${each.total_s}`;
    if (row.dataset.version === version) return;
    row.dataset.version = version;
    outcome.replaceChildren(outcomeChip(each.outcome));
    stages.replaceChildren(stageBar(each.stages));
  }

  showDetail() {
    const { detail } = this;
    this.side.hidden = !this.chosen;
    if (!this.chosen) return;
    const version = detail ? `${detail.request_id}/${detail.outcome}/${detail.total_s}` : `${this.chosen}?`;
    if (this.shown === version) return;
    this.shown = version;
    const head = h("div", { class: "head" }, h("h3", { class: "mono wrap" }, this.chosen), h("a", { href: "#requests" }, "Close"));
    if (!detail) {
      this.side.replaceChildren(head, empty("No router that answered knows this request; it may have been dropped."));
      return;
    }
    this.side.replaceChildren(head, ...detailOf(detail, this.isNamed));
  }
}

const brief = (id) => (id.length > 22 ? `${id.slice(0, 12)}…${id.slice(-6)}` : id);
const isPlaced = (each) => Boolean(each.prefill_worker || each.decode_worker);
const way = (each) => ([["prefill", each.prefill_worker === each.decode_worker ? "" : each.prefill_worker], ["decode", each.decode_worker]]
  .flatMap(([role, id]) => (id ? [`${id} (${role})`] : [])).join(" → ") || "–") + (each.retries ? ` (again ${each.retries}×)` : "");

function detailOf(detail, isNamed) {
  const objective = (s) => (s === null ? "none" : tick(s));
  const facts = h("div", { class: "grid" },
    h("div", { class: "w4" }, named({
      "outcome": outcomeName(detail.outcome) + (detail.blamed_stage ? `, by ${stageName(detail.blamed_stage)}` : ""), "arrived": clock(detail.arrived_s, true),
      "tenant, class": `${detail.tenant}, ${detail.slo_class || "–"}`, "router": detail.router,
      ...(isNamed ? { "model, release": `${detail.model || "–"}, ${detail.release || "–"}` } : {}),
    })),
    h("div", { class: "w4" }, named({
      "first token": `${duration(detail.ttft_s)} (objective ${objective(detail.ttft_objective_s)})`, "between tokens": `${duration(detail.itl_s)} (objective ${objective(detail.itl_objective_s)})`,
      "total": `${duration(detail.total_s)} (objective ${objective(detail.e2e_objective_s)})`,
    })),
    h("div", { class: "w4" }, named({
      "went": way(detail), "mode": detail.mode || "not placed", "prompt": `${figure(detail.num_prompt_tokens, 0)} tokens, ${figure(detail.num_cached_tokens, 0)} from cache`,
      "answer": `${figure(detail.num_tokens, 0)} tokens${detail.num_choices > 1 ? ` in ${detail.num_choices} choices` : ""}`,
    })));
  const error = detail.error ? h("p", { class: "bad wrap" }, detail.error) : null;
  return [error, facts, heading("Timeline"), phaseBar(detail), stageLegend(detail.stages),
    h("ol", { class: "events" }, (detail.events || []).map((event) =>
      h("li", { class: event.what }, h("time", {}, `+${duration(event.at_s)}`), h("span", { class: "wrap" }, event.text)))),
    detail.num_events_left_out ? h("p", { class: "soft" }, `${detail.num_events_left_out} events in the middle are omitted.`) : null,
    ...(detail.placements || []).map(placementOf)].filter(Boolean);
}

function phaseBar(detail) {
  const bar = stageBar(detail.stages, true);
  if (detail.phases?.length) {
    bar.replaceChildren(...detail.phases.map((phase) => {
      const piece = width(h("i", { class: stageClass(phase.stage) }), (phase.end_s - phase.begin_s) / (detail.total_s || 1));
      piece.title = `${stageName(phase.stage)}: ${duration(phase.end_s - phase.begin_s)}, from ${duration(phase.begin_s)} on`;
      return piece;
    }));
  }
  return bar;
}

const TERMS = { wait_s: "wait", room_s: "wait for free blocks", pull_s: "pull of a prefix", compute_s: "compute", exposed_s: "KV transfer after it", step_s: "a token" };

function placementOf(placement) {
  const rows = [["first token", placement.predicted_ttft_s, placement.measured_ttft_s], ...Object.entries(TERMS).map(([term, name]) =>
    [name, placement.predicted[term], placement.measured?.[term]])];
  const table = (head, lines) => h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": head[0] || "placement" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { scope: "col", class: i ? "number" : "" }, name || h("span", { class: "hidden" }, "term"))))),
    h("tbody", {}, lines.map(([name, ...cells]) => h("tr", {}, h("th", { scope: "row" }, name), cells.map((cell) => h("td", { class: "number" }, cell)))))));
  const options = placement.options || [];
  return h("div", { class: "grid" },
    h("div", { class: options.length ? "w5" : "w12" }, h("div", { class: "head" }, heading(`Predicted and measured${placement.choice_index ? `, choice ${placement.choice_index}` : ""}`), h("span", { class: "soft small" }, placement.outcome)),
      table(["", "predicted", "measured"], rows.map(([name, ...seconds]) => [name, ...seconds.map((s) => duration(s))]))),
    options.length ? h("div", { class: "w7" }, h("div", { class: "head" }, heading("Candidate workers")),
      table(["worker", "role", "cached", "wait", "compute", "cost"], options.map((each) =>
        [each.worker_id, each.role, figure(each.num_cached_tokens, 0), duration(each.wait_s), duration(each.compute_s), duration(each.cost_s)]))) : null);
}
