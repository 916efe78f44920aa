// Playground: a streamed chat or completion, with the time of its stages, and the same call in code.

import { headers, key, refusal } from "./asking.js";
import { copy, h, heading, keyed, say, stageBar, stageLegend } from "./draw.js";
import { duration, figure } from "./figures.js";

const FIRST = { chat: "What is the capital of France?", completion: "Once upon a time" };

export class Playground {
  constructor() {
    this.mode = "chat";
    this.language = "curl";
    this.messages = [];
    this.names = [];
    this.chosen = "";
    this.grpc = "127.0.0.1:50051";
    const changed = () => this.showCode();
    const radio = (value, text) => h("label", {}, h("input", { type: "radio", name: "mode", value, checked: value === this.mode, onchange: () => this.choose(value) }), h("span", {}, text));
    this.system = h("input", { placeholder: "none", oninput: changed });
    this.prompt = h("textarea", { rows: 4, value: FIRST.chat, oninput: changed, onkeydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.send(event);
    } });
    this.max = h("input", { type: "number", min: 1, value: 128, oninput: changed });
    this.temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, value: 0, oninput: changed });
    this.go = h("button", { class: "primary" }, "Send");
    this.stop = h("button", { type: "button", onclick: () => this.aborter?.abort(), hidden: true }, "Stop");
    this.fresh = h("button", { type: "button", onclick: () => this.forget(), hidden: true }, "New conversation");
    this.models = h("select", { onchange: changed });
    this.modelField = h("label", { class: "field", hidden: true }, "Model", this.models);
    this.systemField = h("label", { class: "field" }, "System", this.system);
    this.form = h("form", { class: "stack", onsubmit: (event) => this.send(event) },
      h("div", { class: "head" }, h("div", { class: "choice", role: "radiogroup", "aria-label": "Kind of request" }, radio("chat", "Chat"), radio("completion", "Completion")),
        h("span", { class: "soft small" }, "Ctrl + Enter sends")),
      this.modelField, this.systemField, h("label", { class: "field" }, "Prompt", this.prompt),
      h("div", { class: "form" }, h("label", { class: "field" }, "Maximum response tokens", this.max), h("label", { class: "field" }, "Temperature", this.temperature)),
      h("div", { class: "row" }, this.go, this.stop, this.fresh));
    this.talk = h("div", { class: "talk", "aria-live": "polite" });
    this.figures = h("dl", { class: "figures" });
    this.stages = h("div", { class: "stack" });
    this.measured = h("section", { class: "card stack", hidden: true, "aria-label": "Where the time went" }, heading("Where the time went"), this.figures, this.stages);
    this.code = h("pre", { class: "code", tabIndex: 0, role: "region", "aria-label": "The same call" });
    this.tabs = h("div", { class: "tabs", role: "group", "aria-label": "Language" }, ["curl", "Python", "gRPC"].map((name) =>
      h("button", { type: "button", "aria-pressed": String(name === this.language), onclick: () => this.speak(name) }, name)));
    this.element = h("div", { class: "grid" },
      h("div", { class: "w5 stack" }, h("section", { class: "card", "aria-label": "Request" }, this.form),
        h("section", { class: "card stack" }, h("div", { class: "head" }, heading("The same, from code"),
          h("span", { class: "row" }, this.tabs, h("button", { type: "button", onclick: () => copy(this.code.textContent, "The call") }, "Copy"))), this.code)),
      h("div", { class: "w7 stack" }, h("section", { class: "card stack" }, heading("Response"), this.talk), this.measured));
    this.forget();
  }

  update(state) {
    const served = state.models.length ? state.models : state.cards.filter((card) => !card.parent);
    const names = [...new Set(served.map((each) => each.id))].sort(), grpc = state.status?.routers[0]?.grpc || this.grpc;
    if (names.join() === this.names.join() && state.chosen === this.chosen && grpc === this.grpc && Boolean(key()) === this.hadKey) return;
    keyed(this.models, names, (name) => name, (name) => h("option", { value: name }, name), () => {});
    if (state.chosen && state.chosen !== this.chosen) this.models.value = state.status?.models[0]?.id || this.models.value;
    this.modelField.hidden = names.length < 2;
    Object.assign(this, { names, chosen: state.chosen, grpc, hadKey: Boolean(key()) });
    this.showCode();
  }

  choose(mode) {
    if (this.prompt.value === FIRST[this.mode]) this.prompt.value = FIRST[mode];
    this.mode = mode;
    this.systemField.hidden = mode !== "chat";
    this.forget();
  }

  forget() {
    this.aborter?.abort();
    this.messages = [];
    this.sent = null; // the body of the latest request, which is shown as code until the user edits the prompt
    this.fresh.hidden = true;
    this.measured.hidden = true;
    this.talk.replaceChildren(h("p", { class: "soft" }, "The response appears here while it is generated."));
    this.showCode();
  }

  // The body of the request, without fields that only the page needs.
  body() {
    const sampling = { max_tokens: Number(this.max.value) || 128, temperature: Number(this.temperature.value) || 0 };
    if (this.mode === "completion") return { model: this.models.value, prompt: this.prompt.value, ...sampling };
    const system = this.system.value.trim() ? [{ role: "system", content: this.system.value.trim() }] : [];
    return { model: this.models.value, messages: [...system, ...this.messages, { role: "user", content: this.prompt.value }], ...sampling };
  }

  async send(event) {
    event.preventDefault();
    if (this.aborter || !this.prompt.value.trim()) return;
    const isChat = this.mode === "chat", body = this.body(), asked = this.prompt.value;
    if (!this.messages.length) this.talk.replaceChildren();
    if (isChat) this.talk.append(h("div", { class: "say user" }, asked));
    const thought = this.talk.appendChild(h("div", { class: "say reasoning", hidden: true }));
    const answer = this.talk.appendChild(h("div", { class: "say assistant running" }));
    this.aborter = new AbortController();
    this.sent = body;
    this.busy(true);
    const beganMs = performance.now(), seen = { firstMs: null, usage: null, timing: null, id: "", text: "" };
    try {
      for await (const chunk of streamed(isChat ? "v1/chat/completions" : "v1/completions", body, this.aborter.signal)) {
        seen.id = chunk.id || seen.id;
        const choice = chunk.choices?.[0], delta = choice?.delta;
        const text = (isChat ? delta?.content : choice?.text) || "", reasoning = delta?.reasoning || delta?.reasoning_content || "";
        if ((text || reasoning) && seen.firstMs === null) seen.firstMs = performance.now() - beganMs;
        if (reasoning) thought.hidden = false;
        thought.append(reasoning);
        answer.append(text);
        seen.text += text;
        if (chunk.usage) Object.assign(seen, { usage: chunk.usage, timing: chunk.timing });
        if (choice?.finish_reason === "length") answer.title = "The response reached its maximum length";
      }
      if (isChat) this.messages.push({ role: "user", content: asked }, { role: "assistant", content: seen.text });
      if (isChat) this.prompt.value = "";
    } catch (error) {
      if (error.name === "AbortError") answer.append(h("span", { class: "soft" }, " (stopped)"));
      else answer.replaceWith(h("div", { class: "say error", role: "alert" }, error.message));
    }
    answer.classList.remove("running");
    this.aborter = null;
    this.busy(false);
    if (seen.timing) this.showMeasured(seen, performance.now() - beganMs);
    this.showCode();
  }

  busy(is) {
    this.go.disabled = is;
    this.stop.hidden = !is;
    this.fresh.hidden = is || !this.messages.length;
  }

  showMeasured({ usage, timing, firstMs, id }, totalMs) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0, after = timing.total_s - timing.ttft_s;
    const went = timing.prefill_worker && timing.prefill_worker !== timing.decode_worker ? `${timing.prefill_worker} (prefill) → ${timing.decode_worker} (decode)` : timing.decode_worker;
    const list = {
      "first token": duration(timing.ttft_s), "total": duration(timing.total_s),
      "tokens/s": after > 0 && usage.completion_tokens > 1 ? figure((usage.completion_tokens - 1) / after) : "–",
      "prompt, cached": `${usage.prompt_tokens}, ${cached}`, "response": `${usage.completion_tokens} tokens`, "workers": went || "–",
    };
    this.figures.replaceChildren(...Object.entries(list).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    const seconds = { queue: timing.queue_s, decode_admission: timing.admission_s, prefill: timing.prefill_s, transfer: timing.transfer_s, decode: timing.decode_s, recovery: timing.recovery_s };
    this.stages.replaceChildren(stageBar(seconds, true), stageLegend(seconds), h("p", { class: "small soft" },
      `Measured in this browser: first token ${duration(firstMs === null ? null : firstMs / 1000)}, total ${duration(totalMs / 1000)}. `,
      h("a", { href: `#requests/${encodeURIComponent(id)}` }, "Timeline")));
    this.measured.hidden = false;
  }

  speak(name) {
    this.language = name;
    for (const button of this.tabs.children) button.setAttribute("aria-pressed", String(button.textContent === name));
    this.showCode();
  }

  showCode() {
    const body = this.sent && !this.prompt.value.trim() ? this.sent : this.body();
    say(this.code, CODE[this.language](body, this.mode, this.grpc, Boolean(key()), this.names.length > 1));
  }
}

// Yields the events of a streamed response.
async function* streamed(path, body, signal) {
  const asked = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
  const answer = await fetch(path, { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: asked, signal });
  if (!answer.ok) throw await refusal(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const base = () => new URL(".", location.href).href.replace(/\/$/, "");
const python = (value) => JSON.stringify(value).replaceAll(/[\u007f-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

const CODE = {
  curl(body, mode, _, hasKey) {
    const auth = hasKey ? '  -H "Authorization: Bearer $BATON_API_KEY" \\\n' : "";
    return `curl ${base()}/v1/${mode === "chat" ? "chat/completions" : "completions"} \\\n  -H 'Content-Type: application/json' \\\n${auth}  -d ${quoted(JSON.stringify(body, null, 2))}`;
  },
  Python(body, mode, _, hasKey) {
    const call = mode === "chat" ? "chat.completions" : "completions", what = mode === "chat" ? `messages=${python(body.messages)}` : `prompt=${python(body.prompt)}`;
    return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${base()}/v1", api_key=${hasKey ? 'os.environ["BATON_API_KEY"]' : '"none"'})\n`
      + `stream = client.${call}.create(\n    model=${python(body.model)},\n    ${what},\n    max_tokens=${body.max_tokens},\n    temperature=${body.temperature},\n    stream=True,\n)\n`
      + `for chunk in stream:\n    print(chunk.choices[0].${mode === "chat" ? 'delta.content or ""' : "text"}, end="", flush=True)`;
  },
  gRPC(body, mode, grpc, hasKey, isNamed) {
    const sampling = { maxTokens: body.max_tokens, temperature: body.temperature }, model = isNamed ? { model: body.model } : {};
    const message = { ...model, ...(mode === "chat" ? { chat: { messages: body.messages } } : { text: body.prompt }), sampling };
    const isTls = location.protocol === "https:", auth = hasKey ? '  -H "Authorization: Bearer $BATON_API_KEY" \\\n' : "";
    return `buf curl --protocol grpc ${isTls ? "" : "--http2-prior-knowledge "}\\\n${auth}  -d ${quoted(JSON.stringify(message, null, 2))} \\\n  ${isTls ? "https" : "http"}://${grpc}/baton.v1.Inference/Generate`;
  },
};
