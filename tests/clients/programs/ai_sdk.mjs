// The Vercel AI SDK with its default OpenAI provider: a tool loop, then another turn of the same conversation.
// Arguments: the server's /v1, the folder of node_modules, a file for the conversation, the model, the question.

import { createRequire } from "node:module";
import { existsSync, readFileSync, writeFileSync } from "node:fs";

const [url, modules, file, model, question] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const { generateText, stepCountIs, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { z } = require("zod");

const messages = existsSync(file) ? JSON.parse(readFileSync(file, "utf8")) : [];
const isFirst = messages.length === 0;
messages.push({ role: "user", content: question });
const bodies = [];
function recording(address, request) {
  bodies.push(String(request.body));
  return fetch(address, request);
}
const options = {
  model: createOpenAI({ baseURL: url, apiKey: "none", fetch: recording })(model),
  messages,
  stopWhen: stepCountIs(5),
  maxRetries: 0,
  tools: {
    look: tool({
      description: "Looks.",
      inputSchema: z.object({ place: z.string() }),
      execute: async ({ place }) => `${place}: 42 cats`,
    }),
  },
};
const result = isFirst ? await generateText(options) : streamText(options);
const text = await result.text;
const steps = await result.steps;
messages.push(...(await result.responseMessages)); // of all steps; `response` has the last one's
writeFileSync(file, JSON.stringify(messages));
const referred = bodies.map((body) => body.split("item_reference").length - 1);
console.log(JSON.stringify({ text, steps: steps.length, referred }));
