// The APIs of this port, from the router's OpenAPI document.

import { ask } from "./asking.js";
import { copy, empty, h, heading, say } from "./draw.js";

const OTHERS = [["get", "/health", "200 if requests can be served; the same as /readyz."], ["get", "/healthz", "200 while the process runs."]];

export class Reference {
  constructor() {
    this.search = h("input", { type: "search", placeholder: "Find a path or a field", "aria-label": "Find a path or a field", oninput: () => this.filter() });
    this.base = h("code", { class: "wrap" });
    this.list = h("section", { class: "card", "aria-label": "Endpoints" }, empty("Reading the document…"));
    this.forOperators = h("div");
    const url = new URL(".", location.href).href;
    say(this.base, url);
    this.element = h("div", { class: "stack" },
      h("section", { class: "card" }, h("div", { class: "head" }, h("div", { class: "row" }, h("span", { class: "soft" }, "Base URL"), this.base,
        h("button", { onclick: () => copy(url, "The base URL") }, "Copy")), h("a", { href: "openapi.json" }, "openapi.json")),
        h("p", { class: "soft" }, "OpenAI and Anthropic clients work with this base URL. If tenants are configured, send a key in the header ",
          h("code", {}, "Authorization: Bearer KEY"), " or ", h("code", {}, "x-api-key: KEY"), ". gRPC offers the same and more; the server supports reflection.")),
      this.search, this.list,
      h("section", { class: "card" }, h("div", { class: "head" }, heading("For operators")), this.forOperators),
      h("section", { class: "card" }, h("div", { class: "head" }, heading("For probes and tools")), OTHERS.map(plain)));
  }

  open() {
    this.reading ||= ask("openapi.json").then((found) => this.show(found), (error) => {
      this.reading = null;
      this.list.replaceChildren(empty(`The document cannot be read: ${error.message}`));
    });
  }

  update() {}

  show(found) {
    const schemas = found.components.schemas;
    const operations = Object.entries(found.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => ({ path, method, operation })));
    const isForOperators = ({ path }) => path.startsWith("/api/");
    this.list.replaceChildren(...operations.filter((each) => !isForOperators(each)).map((each) => described(each, schemas)));
    this.forOperators.replaceChildren(...operations.filter(isForOperators).map((each) => described(each, schemas)));
    this.filter();
  }

  filter() {
    const wanted = this.search.value.trim().toLowerCase();
    for (const each of this.element.querySelectorAll("details")) each.hidden = Boolean(wanted) && !each.textContent.toLowerCase().includes(wanted);
  }
}

function described({ path, method, operation }, schemas) {
  const ref = operation.requestBody?.content["application/json"].schema.$ref, asked = (operation.parameters || []).filter((each) => each.in === "query");
  const schema = ref ? schemas[ref.split("/").at(-1)] : asked.length ? { properties: Object.fromEntries(asked.map((each) => [each.name, each.schema])) } : null;
  return h("details", { class: "op" },
    h("summary", {}, h("span", { class: `method ${method}` }, method.toUpperCase()), h("code", { class: "strong" }, path), h("span", { class: "soft" }, operation.summary || "")),
    schema ? h("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": `Fields of ${path}` }, fields(schema)) : h("div", { class: "soft" }, "No body."));
}

function plain([method, path, what]) {
  return h("div", { class: "row op-line" }, h("span", { class: `method ${method}` }, method.toUpperCase()), h("code", { class: "strong" }, path), h("span", { class: "soft" }, what));
}

function fields(schema) {
  const required = new Set(schema.required || []);
  const rows = Object.entries(schema.properties || {}).sort(([a], [b]) => required.has(b) - required.has(a) || a.localeCompare(b)).map(([name, field]) =>
    h("tr", {}, h("th", { scope: "row" }, h("code", { class: "strong" }, name), required.has(name) ? h("span", { class: "warn small" }, " required") : null),
      h("td", { class: "mono soft" }, kind(field)), h("td", { class: "soft" }, field.description || "")));
  return h("table", {}, h("thead", {}, h("tr", {}, ["field", "type", ""].map((name) => h("th", { scope: "col" }, name || h("span", { class: "hidden" }, "meaning"))))), h("tbody", {}, rows));
}

function kind(field) {
  if (field.$ref) return field.$ref.split("/").at(-1);
  if (field.anyOf) return [...new Set(field.anyOf.map((each) => kind(each)))].filter((each) => each !== "null").join(" | ");
  if (field.enum) return field.enum.map((each) => JSON.stringify(each)).join(" | ");
  if ("const" in field) return JSON.stringify(field.const);
  if (field.type === "array") return `[${field.items ? kind(field.items) : "any"}]`;
  return field.type || "any";
}
