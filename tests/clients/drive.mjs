// One turn of a JavaScript client, tool calls with it: `node drive.mjs NAME URL MODEL [plain]`. Prints what drive.py prints.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [name, url, model, plain] = process.argv.slice(2);
const require = createRequire(`${process.env.CLIENTS}/js/`);
const load = (each) => import(pathToFileURL(require.resolve(each)).href);
const PROMPT = plain ? "What is the capital of France?" : "Read notes.md, and say what 6 * 7 is.";
const called = [];
const FIELDS = { read_file: "path", calculate: "expression" };
const run = (tool) => (called.push(tool), "42");
const schema = (field) => ({ type: "object", properties: { [field]: { type: "string" } }, required: [field], additionalProperties: false });
const tools = Object.entries(plain ? {} : FIELDS).map(([tool, field]) => ({ name: tool, description: "A tool.", parameters: schema(field), strict: true }));

const CLIENTS = {
  async openai_js() {
    const { default: OpenAI } = await load("openai");
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
    const functions = tools.map((each) => ({ type: "function", function: { ...each, function: run.bind(null, each.name), parse: JSON.parse } }));
    const runner = client.chat.completions.runTools({ model, stream: true, messages: [{ role: "user", content: PROMPT }], tools: functions });
    return await runner.finalContent();
  },
  async anthropic_js() {
    const { default: Anthropic } = await load("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: url, apiKey: "none" });
    const messages = [{ role: "user", content: PROMPT }];
    const defined = tools.map(({ parameters, ...each }) => ({ ...each, input_schema: parameters }));
    let message;
    for (let turn = 0; turn < 2; turn++) {
      message = await client.messages.stream({ model, max_tokens: 4096, messages, tools: defined }).finalMessage();
      const results = message.content.filter((each) => each.type === "tool_use")
        .map((each) => ({ type: "tool_result", tool_use_id: each.id, content: run(each.name) }));
      if (!results.length) break;
      messages.push({ role: "assistant", content: message.content }, { role: "user", content: results });
    }
    return message.content.at(-1).text;
  },
  ai_openai: () => vercel(async () => (await load("@ai-sdk/openai")).createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).responses(model)),
  ai_compatible: () =>
    vercel(async () => (await load("@ai-sdk/openai-compatible")).createOpenAICompatible({ name: "tokamac", baseURL: `${url}/v1` })(model)),
  ai_anthropic: () => vercel(async () => (await load("@ai-sdk/anthropic")).createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model)),
};

async function vercel(made) {
  const { jsonSchema, stepCountIs, streamText, tool } = await load("ai");
  const offered = Object.fromEntries(tools.map((each) => [
    each.name, tool({ description: "A tool.", inputSchema: jsonSchema(each.parameters), execute: () => run(each.name) }),
  ]));
  return await streamText({ model: await made(), prompt: PROMPT, tools: offered, stopWhen: stepCountIs(3) }).text;
}

const text = await CLIENTS[name]();
console.log(JSON.stringify({ called, text }));
