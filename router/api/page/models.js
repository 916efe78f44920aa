// The models of the endpoint with their states. An operator can wake one that sleeps.

import { confirm, h, heading, keyed, say } from "./draw.js";
import { isListed, modelLines } from "./figures.js";
import { forModel, give } from "./orders.js";

export class Models {
  constructor() {
    this.list = h("ul", { class: "models" });
    this.element = h("section", { class: "card w12", "aria-label": "Models", hidden: true }, heading("Models"), this.list);
  }

  update(state) {
    this.element.hidden = !isListed(state.models);
    if (this.element.hidden) return;
    keyed(this.list, modelLines(state.status.models, state.models), (line) => line.release, (line) => this.line(line, state),
      (element, { name, state: word, level, facts, canWake }) => {
        const [chip, text, wake] = element.children;
        say(chip, word, `chip ${level}`);
        say(text.firstElementChild, name);
        text.firstElementChild.disabled = state.models.length < 2;
        say(text.lastElementChild, facts.join(" · "));
        wake.hidden = !canWake || !state.hasOrders;
      });
  }

  line({ release, name }, state) {
    const choose = h("button", { class: "link strong wrap", title: "Show this model only", onclick: () => state.choose(release) });
    const wake = h("button", { onclick: () => this.wake(release, name) }, "Wake…");
    return h("li", {}, h("span", { class: "chip" }), h("div", {}, choose, h("div", { class: "soft small wrap" })), wake);
  }

  async wake(release, name) {
    const text = "Its controller starts its workers, as for a request.";
    if (await confirm({ title: `Wake ${name}?`, text, yes: "Wake it" })) await give(`${name} wakes`, "api/models/wake", forModel(release));
  }
}
