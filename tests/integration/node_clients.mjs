// Streams of each API, read to their end by the packages of npm. Arguments: the base URL. Prints a line for each stream.
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { jsonSchema, streamText, tool } from "ai";
import assert from "node:assert/strict";
import OpenAI from "openai";

const base = process.argv[2];
const settings = { apiKey: "none", maxRetries: 0 };
const openai = new OpenAI({ ...settings, baseURL: `${base}/v1` });
const claude = new Anthropic({ ...settings, baseURL: base });
const question = "Is it sunny in Bern?";
const schema = {
  type: "object",
  properties: { sky: { enum: ["sunny", "cloudy"] } },
  required: ["sky"],
  additionalProperties: false,
};
const called = { name: "report", description: "Says what the sky does.", parameters: schema };
const ask = { model: "", messages: [{ role: "user", content: question }], max_tokens: 40 };
const respond = { model: "", input: question, max_output_tokens: 40 };

function checkArguments(value) {
  assert.ok(["sunny", "cloudy"].includes(value.sky), JSON.stringify(value));
}

async function drained(stream) {
  let count = 0;
  for await (const _ of stream) count += 1;
  assert.ok(count > 1, `${count} events`);
}

const chatTools = {
  tools: [{ type: "function", function: called }],
  tool_choice: "required",
  parallel_tool_calls: false,
};
const responseTools = { ...chatTools, tools: [{ type: "function", strict: true, ...called }] };
const claudeTools = {
  tools: [{ name: called.name, input_schema: schema }],
  tool_choice: { type: "any", disable_parallel_tool_use: true },
};

const streams = {
  async "openai chat"() {
    const stream = openai.chat.completions.stream({ ...ask, stream_options: { include_usage: true } });
    await drained(stream);
    assert.ok((await stream.totalUsage()).completion_tokens > 0);
    assert.equal(typeof (await stream.finalMessage()).content, "string");
  },
  async "openai chat, calls"() {
    const stream = openai.chat.completions.stream({ ...ask, ...chatTools });
    await drained(stream);
    const [call] = (await stream.finalMessage()).tool_calls;
    checkArguments(JSON.parse(call.function.arguments));
  },
  async "openai responses"() {
    const stream = openai.responses.stream(respond);
    await drained(stream);
    const response = await stream.finalResponse();
    assert.ok(["completed", "incomplete"].includes(response.status), response.status);
    assert.ok(response.usage.output_tokens > 0);
  },
  async "openai responses, calls"() {
    const stream = openai.responses.stream({ ...respond, ...responseTools });
    await drained(stream);
    const [call] = (await stream.finalResponse()).output;
    checkArguments(JSON.parse(call.arguments));
  },
  async "anthropic messages"() {
    const stream = claude.messages.stream(ask);
    await drained(stream);
    const message = await stream.finalMessage();
    assert.ok(["end_turn", "max_tokens"].includes(message.stop_reason), message.stop_reason);
    assert.ok(message.usage.output_tokens > 0);
  },
  async "anthropic messages, calls"() {
    const stream = claude.messages.stream({ ...ask, ...claudeTools });
    await drained(stream);
    const message = await stream.finalMessage();
    assert.equal(message.stop_reason, "tool_use");
    checkArguments(message.content[0].input);
  },
  async "anthropic tool runner"() {
    const run = () => "noted";
    const tools = [{ ...claudeTools.tools[0], type: "custom", run, parse: (input) => input }];
    const runner = claude.beta.messages.toolRunner({ ...ask, ...claudeTools, tools, max_iterations: 2 });
    const endings = [];
    for await (const message of runner) endings.push(message.stop_reason);
    assert.deepEqual(endings, ["tool_use", "tool_use"]);
  },
};

const models = {
  "ai openai-compatible": createOpenAICompatible({ ...settings, baseURL: `${base}/v1`, name: "baton", includeUsage: true })("m"),
  "ai openai responses": createOpenAI({ ...settings, baseURL: `${base}/v1` }).responses("m"),
  "ai anthropic": createAnthropic({ ...settings, baseURL: `${base}/v1` })("m"),
};
const { data } = await openai.models.list();
for (const [name, model] of Object.entries(models)) {
  model.modelId = data[0].id;
  for (const toolChoice of ["none", "required"]) {
    streams[`${name}, tools ${toolChoice}`] = async () => {
      const report = tool({ description: called.description, inputSchema: jsonSchema(schema) });
      const broken = [];
      const onError = ({ error }) => broken.push(error);
      const tools = toolChoice === "none" ? {} : { report };
      const result = streamText({ model, prompt: question, maxOutputTokens: 40, maxRetries: 0, tools, toolChoice, onError });
      await drained(result.fullStream);
      assert.deepEqual(broken, []);
      assert.ok((await result.usage).outputTokens > 0);
      const [call] = await result.toolCalls;
      if (toolChoice === "required") checkArguments(call.input);
    };
  }
}

for (const [name, read] of Object.entries(streams)) {
  await read();
  console.log(`read: ${name}`);
}
