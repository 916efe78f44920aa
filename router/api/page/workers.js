// All workers with their logs, and commands for operators with a key.

import { ask } from "./asking.js";
import { confirm, empty, h, heading, keyed, named, say, stateClass, toast, width } from "./draw.js";
import { age, figure, percent, poolLines, rates, short, workerKey } from "./figures.js";
import { forModel, give } from "./orders.js";

const OTHER = { prefill: "decode", decode: "prefill" };

export class Workers {
  constructor() {
    this.logs = new Map(); // worker's key -> {worker, lines of its log}, for open logs
    this.note = h("p", { class: "soft" });
    this.pools = h("div", { class: "grid" });
    this.workers = h("div", { class: "workers" });
    this.none = empty("No workers are known.");
    this.element = h("div", { class: "stack" }, this.note, this.pools, this.workers, this.none);
  }

  async look() {
    for (const [key, { worker }] of this.logs) this.logs.set(key, { worker, lines: await readLog(worker) });
  }

  update(state) {
    const { status } = state;
    this.element.hidden = !status;
    if (!status) return;
    if (this.note.dataset.key !== String(status.takes_orders)) {
      this.note.dataset.key = String(status.takes_orders);
      this.note.replaceChildren(...(status.takes_orders ? ["The controller carries out commands. The page asks for confirmation first."] : [
        "The page can send commands only with an operator's API key, but no tenants' file is configured. Use a terminal instead: ",
        ...["baton scale", "baton drain", "baton role"].flatMap((name) => [h("code", {}, name), " "])]));
    }
    keyed(this.pools, poolLines(status.models), (line) => `${line.key}/${line.title}`, (line) => this.pool(line), (element, line) => this.showPool(element, line, state.hasOrders));
    const computed = rates(state.before, status, "workers", (worker) => worker.computed_tokens);
    const list = [...status.workers].sort((a, b) => b.role.localeCompare(a.role) || a.release.localeCompare(b.release) || a.id.localeCompare(b.id, "en", { numeric: true }));
    this.none.hidden = list.length > 0;
    keyed(this.workers, list, (worker) => `${workerKey(worker)}/${worker.pid}`, (worker) => this.worker(worker),
      (element, worker) => this.showWorker(element, worker, computed[workerKey(worker)], state));
  }

  pool(line) {
    const size = h("input", { type: "number", min: 0, max: 10000, class: "size", "aria-label": `Workers of the ${line.text}` });
    size.addEventListener("input", () => (size.dataset.touched = "yes"));
    const scale = h("form", { class: "row", onsubmit: (event) => this.scale(event, line, size) }, size, h("button", {}, "Scale…"));
    return h("section", { class: "card w6" }, h("div", { class: "head" }, heading(line.title), scale), h("div", { class: "big" }, h("span"), h("small")));
  }

  showPool(element, { pool, wanted }, hasOrders) {
    const [head, big] = element.children, scale = head.lastElementChild, size = scale.firstElementChild;
    scale.hidden = !hasOrders;
    if (!size.dataset.touched && document.activeElement !== size) size.value = pool.desired;
    const level = pool.ready >= pool.desired ? "good" : pool.ready ? "warn" : "bad";
    say(big.firstElementChild, `${pool.ready} of ${pool.desired}`, level);
    say(big.lastElementChild, `ready${wanted === undefined ? "" : ` · the autoscaler wants ${wanted}`}`);
  }

  worker(worker) {
    const { id } = worker;
    const log = h("button", { onclick: () => this.toggleLog(worker), "aria-expanded": "false" }, "Log");
    const role = h("button", { onclick: () => this.flip(worker) });
    const drain = h("button", { class: "danger", onclick: () => this.drain(worker) }, "Drain…");
    return h("section", { class: "card worker stack", "aria-label": id },
      h("div", { class: "head" }, h("h3", { class: "wrap" }, id), h("span", { class: "row" }, h("span", { class: "chip" }), h("span", { class: "chip" }))),
      h("div"), h("div", {}, h("div", { class: "small soft" }), h("div", { class: "meter", "aria-hidden": "true" }, h("i"), h("i", { class: "cached" }))),
      h("div", { class: "row" }, log, role, drain), h("pre", { class: "log", tabIndex: 0, hidden: true, role: "region", "aria-label": `Log of ${id}` }));
  }

  showWorker(element, worker, perS, state) {
    const [head, facts, memory, buttons, log] = element.children, [state_, role_] = head.lastElementChild.children;
    const isWell = worker.self_check === "ok", { blocks } = worker, key = workerKey(worker);
    this.roles = { ...this.roles, [key]: worker.role };
    element.className = `card worker stack ${worker.role}${this.logs.has(key) ? " open" : ""}`;
    say(state_, isWell ? worker.state : `self-check: ${worker.self_check}`, `chip ${isWell ? stateClass(worker.state) : "bad"}`);
    say(role_, worker.role);
    const bornS = worker.epoch / 1000; // an epoch is the time in milliseconds at which the worker joined
    const list = {
      ...(state.status.models.length > 1 ? { "release": worker.release || "–" } : {}),
      "work": `${worker.running} running, ${worker.waiting} waiting`, "tokens/s": short(perS),
      "age": bornS > 1e9 && bornS <= state.nowS + 60 ? age(Math.max(0, state.nowS - bornS)) : "–",
      "node": `${worker.node}, process ${worker.pid}`, "engine": worker.engine || "–", "version": worker.version || "–",
      "computes on": computes(worker.computes), ...(worker.computes.fallbacks.length ? { "slow implementations": worker.computes.fallbacks.join("; ") } : {}),
      "preemptions": figure(worker.preemptions, 0), "KV transfers": `${figure(worker.transfers.committed, 0)} done, ${figure(worker.transfers.failed, 0)} failed`,
    };
    const version = JSON.stringify(list);
    if (facts.dataset.version !== version) {
      facts.dataset.version = version;
      facts.replaceChildren(named(list));
    }
    const used = blocks.total ? blocks.in_use / blocks.total : 0, cached = blocks.total ? blocks.cached / blocks.total : 0;
    say(memory.firstElementChild, `KV: ${percent(used)} in use, ${percent(cached)} cached, ${figure(blocks.total, 0)} blocks`);
    width(memory.lastElementChild.firstElementChild, used);
    width(memory.lastElementChild.lastElementChild, cached);
    const [logButton, role, drain] = buttons.children;
    role.hidden = drain.hidden = !state.hasOrders;
    role.disabled = drain.disabled = worker.state !== "ready";
    say(role, `Change to ${OTHER[worker.role]}…`);
    const lines = this.logs.get(key)?.lines;
    logButton.setAttribute("aria-expanded", String(lines !== undefined));
    log.hidden = lines === undefined;
    if (lines !== undefined && log.textContent !== lines) {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 30 || !log.textContent;
      log.textContent = lines;
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    }
    this.state = state;
  }

  async toggleLog(worker) {
    const key = workerKey(worker);
    if (this.logs.has(key)) this.logs.delete(key);
    else this.logs.set(key, { worker, lines: await readLog(worker) });
    this.update(this.state);
  }

  async drain({ id, release }) {
    const role = this.roles[workerKey({ id, release })];
    const text = `Its requests migrate to other workers with their KV, its process exits, and another worker replaces it. Responses continue.`;
    if (await confirm({ title: `Drain ${id} (${role})?`, text, yes: "Drain it", isDanger: true })) await give(`${id} drains`, `api/workers/${encodeURIComponent(id)}/drain`, forModel(release));
  }

  async flip({ id, release }) {
    const role = this.roles[workerKey({ id, release })], to = OTHER[role];
    const text = `Its requests migrate to other workers first; it keeps its cache. The pools' sizes change: one ${role} worker less, one ${to} worker more.`;
    if (await confirm({ title: `Make ${id} (${role}) a ${to} worker?`, text, yes: `Change to ${to}` })) await give(`${id} is a ${to} worker now`, `api/workers/${encodeURIComponent(id)}/role`, forModel(release, { role: to }));
  }

  async scale(event, line, size) {
    event.preventDefault();
    const { name, release, key } = line, workers = Number(size.value), which = line.text;
    const now = poolLines(this.state.models).find((each) => each.key === key)?.pool.desired ?? 0;
    const text = workers < now ? `${now - workers} of ${now} workers leave; their requests migrate to the remaining ones.` : `${workers - now} workers start in addition to the current ${now}.`;
    if (workers === now) toast(`The ${which} already has ${now}`);
    else if (await confirm({ title: `Scale the ${which} to ${workers}?`, text: workers ? text : "This pool will have no workers.", yes: `Scale to ${workers}`, isDanger: workers < now })) {
      await give(`Scaling the ${which} to ${workers}`, `api/pools/${encodeURIComponent(name)}`, forModel(release, { workers }));
    }
    delete size.dataset.touched;
  }
}

function computes(by) {
  if (!by.dtype) return "–";
  const words = [`${by.num_ranks > 1 ? `${by.num_ranks} x ` : ""}${by.gpu || "CPU"}`, by.dtype, by.attention && `attention ${by.attention}`];
  if (by.gpu) words.push(`${by.num_graphs} CUDA graphs`, `${by.num_fused} fused modules`);
  return words.concat(by.kv_copies && `KV copied by ${by.kv_copies}`).filter(Boolean).join(", ");
}

async function readLog({ id, release }) {
  const of = release ? `?model=${encodeURIComponent(release)}` : "";
  try {
    return (await ask(`api/workers/${encodeURIComponent(id)}/log${of}`)).lines.join("\n") || "Nothing has been logged yet.";
  } catch (error) {
    return `The log cannot be read: ${error.message}`;
  }
}
