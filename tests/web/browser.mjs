// The page in a real browser: started by tests/helpers/web_test.py, which made everything that job.json names.
import { test } from "node:test";
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const job = JSON.parse(readFileSync(process.argv[2], "utf8"));
const packages = join(job.packages, "node_modules");
const { chromium } = createRequire(pathToFileURL(join(job.packages, "package.json")))("playwright-core");
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const TJS = "/from-npm/";
const PATIENCE = 600_000; // ms: on a busy machine slow is no failure
const report = { browser: "", sites: {} };

const browser = await chromium.launch({ executablePath: job.chromium, args: FLAGS });
report.browser = `Chromium ${browser.version()}`;

// A page of the site with what went wrong on the way: errors, and requests to anywhere else.
async function open(site, { routes = {}, ready = true, ...options } = {}) {
  const context = await browser.newContext(options);
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  const seen = { errors: [], foreign: [], requests: [] };
  page.on("console", (message) => message.type() === "error" && seen.errors.push(message.text()));
  page.on("pageerror", (error) => seen.errors.push(String(error)));
  page.on("request", (request) => {
    seen.requests.push(request.url());
    if (!request.url().startsWith(site.url) && !/^(blob|data):/.test(request.url())) seen.foreign.push(request.url());
  });
  for (const [path, answer] of Object.entries(routes)) await page.route(`${site.url}${path}`, answer);
  await page.goto(site.url, { timeout: PATIENCE });
  if (ready) await page.locator("#form").waitFor();
  return { page, seen, close: () => context.close() };
}

async function ask(page, texts) {
  await page.evaluate(() => document.getElementById("raw").replaceChildren());
  await page.fill("#first", texts[0]);
  if (texts.length > 1) await page.fill("#second", texts[1]);
  await page.press("#first", "Control+Enter");
  await page.waitForFunction(() => document.getElementById("raw").textContent && !document.getElementById("form").hasAttribute("aria-busy"));
  return page.evaluate(() => ({
    tokens: [...document.querySelectorAll("#tokens span")].map((span) => span.textContent),
    raw: document.getElementById("raw").textContent.split("\n").map(Number),
    bars: [...document.querySelectorAll("#bars li")].map((row) => [row.querySelector(".name").textContent, row.querySelector(".value").textContent]),
    note: document.getElementById("note").textContent,
    spoken: document.getElementById("spoken").textContent,
    ms: Number(document.getElementById("times").dataset.ms),
  }));
}

const softmax = (values) => { const powers = values.map((v) => Math.exp(v - Math.max(...values))); return powers.map((p) => p / powers.reduce((a, b) => a + b)); };
const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];

for (const site of job.sites) {
  const told = (report.sites[site.name] = { ...site.about });

  test(`${site.name}: it loads from its own server alone, without an error`, async () => {
    const { page, seen, close } = await open(site);
    assert.deepEqual(seen.foreign, []);
    assert.deepEqual(seen.errors, []);
    assert.equal(await page.title(), site.title);
    assert.equal(await page.locator("h1").textContent(), site.title, "a title is text, whatever it holds");
    assert.equal(await page.locator("h1 *").count(), 0);
    await close();
  });

  test(`${site.name}: the same tokens and outputs as in Python`, async () => {
    const { page, seen, close } = await open(site);
    let worst = 0, sum = 0, count = 0, other = 0;
    for (const { texts, tokens, values, label } of site.expected) {
      const came = await ask(page, texts);
      assert.deepEqual(came.tokens, tokens, texts.join(" | "));
      assert.equal(came.raw.length, values.length);
      const off = values.map((value, i) => Math.abs(value - came.raw[i]));
      worst = Math.max(worst, ...off);
      sum += off.reduce((a, b) => a + b); count += off.length;
      if (site.kind === "single-label") {
        const best = came.raw.indexOf(Math.max(...came.raw));
        if (best !== label) other += 1;
        assert.equal(came.bars[0][0], site.labels[best]);
        assert.equal(came.bars[0][1], `${(100 * Math.max(...softmax(came.raw))).toFixed(1)}%`);
        assert.ok(came.spoken.startsWith(`${site.labels[best]}: `));
      }
    }
    Object.assign(told, { texts: site.expected.length, largest_difference: worst, mean_difference: sum / count, other_labels: other });
    assert.ok(worst <= site.tolerance.largest, `largest difference ${worst}`);
    assert.ok(sum / count <= site.tolerance.mean, `mean difference ${sum / count}`);
    assert.ok(other <= site.tolerance.labels, `${other} other labels`);
    assert.deepEqual(seen.errors, []);
    assert.deepEqual(seen.foreign, []);
    await close();
  });
}

const [classifier] = job.sites;
const embedder = job.sites.find((site) => site.kind === "embedding");
const pairs = job.sites.find((site) => site.pair);

test("the policy of the page stops foreign hosts, code from text, and HTML from text", async () => {
  const { page, close } = await open(classifier);
  const stopped = await page.evaluate(async (elsewhere) => {
    // A timer of the page: code that a debugger evaluates is exempt from the policy while it runs.
    const tried = (act) => new Promise((resolve) => setTimeout(async () => { try { await act(); resolve(false); } catch { resolve(true); } }));
    return {
      fetch: await tried(() => fetch(elsewhere)),
      code: await tried(() => (0, eval)("1")),
      html: await tried(() => { document.body.innerHTML = "<b>x</b>"; }),
      script: await new Promise((resolve) => {
        const made = document.createElement("img");
        made.onload = () => resolve(false);
        made.onerror = () => resolve(true);
        made.src = `${elsewhere}/icon.svg`;
      }),
    };
  }, job.elsewhere);
  assert.deepEqual(stopped, { fetch: true, code: true, html: true, script: true });
  await close();
});

test("the integers of WebAssembly are exact, over the whole range of codes", async () => {
  const { page, close } = await open(classifier, {
    routes: { "exact.onnx": (route) => route.fulfill({ body: readFileSync(job.exact.model), contentType: "application/octet-stream" }) },
  });
  const came = await page.evaluate(async (given) => {
    const ort = await import("./vendor/ort.js");
    const bytes = new Uint8Array(await (await fetch("exact.onnx")).arrayBuffer());
    const session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
    const outputs = await session.run({ a: new ort.Tensor("uint8", Uint8Array.from(given.a), given.shape) });
    return Object.fromEntries(Object.entries(outputs).map(([name, tensor]) => [name, [...tensor.data]]));
  }, job.exact);
  assert.deepEqual(came, job.exact.outputs);
  await close();
});

test("nothing typed, or nothing but spaces, is asked for, not run", async () => {
  const { page, close } = await open(classifier);
  for (const text of ["", "   \n "]) {
    await page.fill("#first", text);
    await page.press("#first", "Control+Enter");
    assert.equal(await page.locator("#note").textContent(), "Type a sentence.");
    assert.equal(await page.locator("#bars li").count(), 0);
  }
  const came = await ask(page, ["good"]);
  assert.equal(came.bars.length, classifier.labels.length);
  await page.fill("#first", "");
  await page.press("#first", "Control+Enter");
  assert.equal(await page.locator("#bars li").count(), 0, "an old answer does not stay");
  await close();
});

test("a very long text is cut, and the page says so", async () => {
  const { page, seen, close } = await open(classifier);
  const came = await ask(page, [classifier.long.texts[0]]);
  assert.deepEqual(came.tokens, classifier.long.tokens);
  assert.match(came.note, new RegExp(`^Only the first ${classifier.longest} of [0-9]+ tokens were read\\.$`));
  for (const [i, value] of classifier.long.values.entries()) assert.ok(Math.abs(value - came.raw[i]) <= classifier.tolerance.largest);
  const wide = "x".repeat(200_000) + " 漢字 👩‍👩‍👧 \u0000\ud800 " + "é".repeat(1000);
  assert.ok((await ask(page, [wide])).bars.length);
  assert.deepEqual(seen.errors, []);
  await close();
});

test("HTML that is typed stays text", async () => {
  const { page, seen, close } = await open(classifier);
  await ask(page, ["<img src=x onerror=alert(1)> <script>document.title='no'</script> good"]);
  assert.equal(await page.title(), classifier.title);
  assert.equal(await page.locator("main img, main script").count(), 0);
  assert.deepEqual(seen.errors, []);
  await close();
});

test("all of it works by keyboard", async () => {
  const { page, close } = await open(classifier);
  const focused = () => page.evaluate(() => document.activeElement.id || document.activeElement.textContent.trim());
  await page.keyboard.press("Tab");
  assert.equal(await focused(), "first");
  await page.keyboard.type("good");
  await page.locator("#bars li").first().waitFor(); // it runs while one types
  const before = await page.locator("#times").textContent();
  await page.keyboard.press("Tab");
  assert.equal(await focused(), "Run");
  const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
  assert.notEqual(outline, "none", "focus can be seen");
  await page.keyboard.press("Enter");
  await page.waitForFunction((text) => document.getElementById("times").textContent !== text, before);
  await page.keyboard.press("Tab");
  const example = await focused();
  await page.keyboard.press("Space");
  assert.equal(await page.inputValue("#first"), example);
  for (let i = 0; i < 10 && (await focused()) !== "Tokens and raw outputs"; i++) await page.keyboard.press("Tab");
  assert.equal(await focused(), "Tokens and raw outputs");
  await page.keyboard.press("Enter");
  assert.ok(await page.locator("#raw").isVisible());
  await close();
});

for (const scheme of ["light", "dark"]) {
  for (const site of job.sites) {
    test(`${site.name}: axe finds nothing to complain about, ${scheme}`, async () => {
      const { page, close } = await open(site, { colorScheme: scheme });
      await ask(page, site.expected[0].texts);
      await page.locator("details").evaluate((details) => { details.open = true; });
      await page.evaluate(readFileSync(join(packages, "axe-core", "axe.min.js"), "utf8"));
      const found = await page.evaluate(() => axe.run(document));
      assert.deepEqual(found.violations.map((rule) => `${rule.id}: ${rule.nodes.map((node) => node.html)}`), []);
      await close();
    });
  }
}

test("on a narrow screen nothing is cut off", async () => {
  for (const site of job.sites) {
    const { page, close } = await open(site, { viewport: { width: 320, height: 640 } });
    await ask(page, site.expected[0].texts);
    const [inner, outer] = await page.evaluate(() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]);
    assert.ok(inner <= outer, `${site.name}: ${inner} > ${outer}`);
    await close();
  }
});

test("what is missing or damaged on the server is said", async () => {
  const cases = [
    [{ "site.json": (route) => route.fulfill({ status: 404 }) }, /site\.json is missing on the server \(status 404\)/],
    [{ [classifier.file]: (route) => route.fulfill({ status: 404 }) }, /\.onnx is missing on the server \(status 404\)/],
    [{ [classifier.file]: (route) => route.abort() }, /\.onnx could not be fetched/],
    [{ [classifier.file]: (route) => route.fulfill({ body: Buffer.from("no model") }) }, /The model could not be loaded/],
    [{ "model/tokenizer.json": (route) => route.fulfill({ body: "{" }) }, /The model could not be loaded/],
    [{ "vendor/ort-wasm.bin": (route) => route.fulfill({ body: Buffer.from([0x1f, 0x8b, 8, 0]) }) }, /The model could not be loaded/],
  ];
  for (const [routes, message] of cases) {
    const { page, close } = await open(classifier, { routes, ready: false });
    await page.locator("#failure").waitFor();
    assert.match(await page.locator("#failure").textContent(), message);
    assert.ok(await page.locator("#form").isHidden());
    await close();
  }
});

test("a server that unpacks the runtime on the way is no problem", async () => {
  const { gunzipSync } = await import("node:zlib");
  const plain = async (route) => {
    const response = await route.fetch();
    await route.fulfill({ response, body: gunzipSync(await response.body()) });
  };
  const { page, close } = await open(classifier, { routes: { "vendor/ort-wasm.bin": plain } });
  assert.ok((await ask(page, ["good"])).bars.length);
  await close();
});

test("pairs: both sentences are needed", { skip: !pairs }, async () => {
  const { page, close } = await open(pairs);
  await page.fill("#first", "one");
  await page.press("#first", "Control+Enter");
  assert.equal(await page.locator("#note").textContent(), "Type both sentences.");
  await close();
});

test("an embedder ranks the sentences of the list, also after it was changed", { skip: !embedder }, async () => {
  const { page, close } = await open(embedder);
  const { query, ranked } = embedder.search;
  const came = await ask(page, [query]);
  assert.deepEqual(came.bars.map(([name]) => name), ranked.slice(0, 10).map(([name]) => name));
  for (const [i, [, score]] of came.bars.entries()) assert.ok(Math.abs(Number(score) - ranked[i][1]) <= 0.02);
  await page.fill("#sentences", `  \n${query}\n${ranked[0][0]}\n${query}`);
  await page.press("#sentences", "Control+Enter");
  await page.waitForFunction(() => document.querySelectorAll("#bars li").length === 2);
  assert.equal(await page.locator("#bars .name").first().textContent(), query);
  assert.equal(await page.locator("#bars .value").first().textContent(), "1.000");
  await close();
});

test("transformers.js reads the model's folder and gives the same answer", async () => {
  const { page, seen, close } = await open(classifier, {
    ready: false,
    routes: {
      [`${TJS.slice(1)}**`]: (route) => {
        const path = new URL(route.request().url()).pathname.slice(TJS.length);
        if (path === "index.html") return route.fulfill({ body: "<!doctype html><title>t</title>", contentType: "text/html" });
        const types = { js: "text/javascript", mjs: "text/javascript", wasm: "application/wasm" };
        return route.fulfill({ body: readFileSync(join(packages, path)), contentType: types[path.split(".").pop()] });
      },
    },
  });
  await page.goto(`${classifier.url}${TJS.slice(1)}index.html`);
  for (const { texts, values } of classifier.expected.slice(0, 5)) {
    const came = await page.evaluate(async ([base, text]) => {
      const { env, pipeline } = await import(`${base}@huggingface/transformers/dist/transformers.min.js`);
      env.allowRemoteModels = false;
      env.allowLocalModels = true;
      env.useBrowserCache = false;
      env.localModelPath = "/";
      env.backends.onnx.wasm.wasmPaths = `${location.origin}${base}onnxruntime-web/dist/`;
      env.backends.onnx.wasm.numThreads = 1;
      globalThis.piped ??= await pipeline("text-classification", "model", { device: "wasm" });
      return globalThis.piped(text, { top_k: null });
    }, [TJS, texts[0]]);
    const shares = softmax(values);
    for (const { label, score } of came) {
      const expected = shares[classifier.labels.indexOf(label)];
      assert.ok(Math.abs(score - expected) <= classifier.tolerance.largest, `${label} ${score} ${expected}`);
    }
  }
  assert.deepEqual(seen.foreign, []);
  const models = seen.requests.filter((url) => url.endsWith(".onnx"));
  assert.ok(models.length >= 1 && models.every((url) => url === `${classifier.url}${classifier.file}`), models.join());
  await close();
});

test("load time and latency, for the record", async () => {
  for (const site of job.sites) {
    const loads = [];
    for (let i = 0; i < 3; i++) {
      const { page, close } = await open(site);
      await ask(page, site.expected[0].texts);
      loads.push(await page.evaluate(() => ({ ...document.getElementById("times").dataset })));
      if (i === 2) {
        const lengths = {};
        for (const texts of site.timed) {
          const runs = [];
          let tokens;
          for (let run = 0; run < job.rounds; run++) {
            const came = await ask(page, texts);
            runs.push(came.ms);
            tokens = came.tokens.length;
          }
          lengths[tokens] = { median: median(runs), least: Math.min(...runs) };
        }
        report.sites[site.name].milliseconds = lengths;
      }
      await close();
    }
    report.sites[site.name].fetch_ms = median(loads.map((load) => Number(load.fetch)));
    report.sites[site.name].prepare_ms = median(loads.map((load) => Number(load.prepare)));
  }
});

test("screenshots", { skip: !job.screenshots }, async () => {
  const looks = [["light", { width: 900, height: 820 }], ["dark", { width: 420, height: 820 }]];
  for (const site of job.sites) {
    for (const [scheme, viewport] of looks) {
      const { page, close } = await open(site, { colorScheme: scheme, viewport, reducedMotion: "reduce" });
      await page.locator("#examples button").first().click();
      await page.locator("#bars li").first().waitFor();
      await page.waitForFunction(() => !document.getElementById("form").hasAttribute("aria-busy"));
      await page.screenshot({ path: join(job.screenshots, `web-${site.name}-${scheme}.png`) });
      await close();
    }
  }
});

test("the browser closes", async () => {
  await browser.close();
  writeFileSync(job.report, JSON.stringify(report, null, 2));
});
