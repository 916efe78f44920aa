// All workers with their logs, and commands for operators with a key.

import { ask, order } from "./asking.js";
import { confirm, empty, h, heading, keyed, named, say, stateClass, toast, width } from "./draw.js";
import { age, figure, percent, rates, short, title } from "./figures.js";

const OTHER = { prefill: "decode", decode: "prefill" };

export class Workers {
  constructor() {
    this.logs = new Map(); // worker -> lines of its log, for open logs
    this.note = h("p", { class: "soft" });
    this.pools = h("div", { class: "grid" });
    this.workers = h("div", { class: "workers" });
    this.none = empty("No workers are known.");
    this.element = h("div", { class: "stack" }, this.note, this.pools, this.workers, this.none);
  }

  async look() {
    for (const id of this.logs.keys()) this.logs.set(id, await readLog(id));
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
    const wanted = Object.fromEntries((status.controller?.scaling || []).map((each) => [each.pool, each.wanted]));
    keyed(this.pools, Object.entries(status.pools).sort().reverse(), ([name]) => name, ([name]) => this.pool(name),
      (element, [name, pool]) => this.showPool(element, pool, wanted[name], state.hasOrders));
    const computed = rates(state.before, status, "workers", (worker) => worker.computed_tokens);
    const list = [...status.workers].sort((a, b) => b.role.localeCompare(a.role) || a.id.localeCompare(b.id, "en", { numeric: true }));
    this.none.hidden = list.length > 0;
    keyed(this.workers, list, (worker) => `${worker.id}/${worker.pid}`, (worker) => this.worker(worker.id),
      (element, worker) => this.showWorker(element, worker, computed[worker.id], state));
  }

  pool(name) {
    const size = h("input", { type: "number", min: 0, max: 10000, class: "size", "aria-label": `Workers of the ${name} pool` });
    size.addEventListener("input", () => (size.dataset.touched = "yes"));
    const scale = h("form", { class: "row", onsubmit: (event) => this.scale(event, name, size) }, size, h("button", {}, "Scale…"));
    return h("section", { class: "card w6" }, h("div", { class: "head" }, heading(`${title(name)} pool`), scale), h("div", { class: "big" }, h("span"), h("small")));
  }

  showPool(element, pool, wanted, hasOrders) {
    const [head, big] = element.children, scale = head.lastElementChild, size = scale.firstElementChild;
    scale.hidden = !hasOrders;
    if (!size.dataset.touched && document.activeElement !== size) size.value = pool.desired;
    const level = pool.ready >= pool.desired ? "good" : pool.ready ? "warn" : "bad";
    say(big.firstElementChild, `${pool.ready} of ${pool.desired}`, level);
    say(big.lastElementChild, `ready${wanted === undefined ? "" : ` · the autoscaler wants ${wanted}`}`);
  }

  worker(id) {
    const log = h("button", { onclick: () => this.toggleLog(id), "aria-expanded": "false" }, "Log");
    const role = h("button", { onclick: () => this.flip(id) });
    const drain = h("button", { class: "danger", onclick: () => this.drain(id) }, "Drain…");
    return h("section", { class: "card worker stack", "aria-label": id },
      h("div", { class: "head" }, h("h3", { class: "wrap" }, id), h("span", { class: "row" }, h("span", { class: "chip" }), h("span", { class: "chip" }))),
      h("div"), h("div", {}, h("div", { class: "small soft" }), h("div", { class: "meter", "aria-hidden": "true" }, h("i"), h("i", { class: "cached" }))),
      h("div", { class: "row" }, log, role, drain), h("pre", { class: "log", tabIndex: 0, hidden: true, role: "region", "aria-label": `Log of ${id}` }));
  }

  showWorker(element, worker, perS, state) {
    const [head, facts, memory, buttons, log] = element.children, [state_, role_] = head.lastElementChild.children;
    const isWell = worker.self_check === "ok", { blocks } = worker;
    this.roles = { ...this.roles, [worker.id]: worker.role };
    element.className = `card worker stack ${worker.role}${this.logs.has(worker.id) ? " open" : ""}`;
    say(state_, isWell ? worker.state : `self-check: ${worker.self_check}`, `chip ${isWell ? stateClass(worker.state) : "bad"}`);
    say(role_, worker.role);
    const bornS = worker.epoch / 1000; // an epoch is the time in milliseconds at which the worker joined
    const list = {
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
    const lines = this.logs.get(worker.id);
    logButton.setAttribute("aria-expanded", String(lines !== undefined));
    log.hidden = lines === undefined;
    if (lines !== undefined && log.textContent !== lines) {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 30 || !log.textContent;
      log.textContent = lines;
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    }
    this.state = state;
  }

  async toggleLog(id) {
    if (this.logs.has(id)) this.logs.delete(id);
    else this.logs.set(id, await readLog(id));
    this.update(this.state);
  }

  async drain(id) {
    const text = `Its requests migrate to other workers with their KV, its process exits, and another worker replaces it. Responses continue.`;
    if (await confirm({ title: `Drain ${id} (${this.roles[id]})?`, text, yes: "Drain it", isDanger: true })) await give(`${id} drains`, `api/workers/${encodeURIComponent(id)}/drain`, {});
  }

  async flip(id) {
    const to = OTHER[this.roles[id]];
    const text = `Its requests migrate to other workers first; it keeps its cache. The pools' sizes change: one ${this.roles[id]} worker less, one ${to} worker more.`;
    if (await confirm({ title: `Make ${id} (${this.roles[id]}) a ${to} worker?`, text, yes: `Change to ${to}` })) await give(`${id} is a ${to} worker now`, `api/workers/${encodeURIComponent(id)}/role`, { role: to });
  }

  async scale(event, name, size) {
    event.preventDefault();
    const workers = Number(size.value), now = this.state.status.pools[name].desired;
    const text = workers < now ? `${now - workers} of ${now} workers leave; their requests migrate to the remaining ones.` : `${workers - now} workers start in addition to the current ${now}.`;
    if (workers === now) toast(`The ${name} pool already has ${now}`);
    else if (await confirm({ title: `Scale the ${name} pool to ${workers}?`, text: workers ? text : "This pool will have no workers.", yes: `Scale to ${workers}`, isDanger: workers < now })) {
      await give(`Scaling the ${name} pool to ${workers}`, `api/pools/${encodeURIComponent(name)}`, { workers });
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

async function readLog(id) {
  try {
    return (await ask(`api/workers/${encodeURIComponent(id)}/log`)).lines.join("\n") || "Nothing has been logged yet.";
  } catch (error) {
    return `The log cannot be read: ${error.message}`;
  }
}

async function give(done, path, body) {
  try {
    await order(path, body);
    toast(done);
  } catch (error) {
    toast(error.status === 401 || error.status === 403 ? `Refused: ${error.message}` : `Failed: ${error.message}`);
  }
}
