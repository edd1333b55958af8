// A person at the page, in a real browser: node browser.js SCENARIO URL SHOTS [KEY]; prints JSON.
// Chromium is CHROMIUM's; pictures of what it shows go to the folder SHOTS.
const fs = require("fs");
const path = require("path");
const { chromium } = require("playwright-core");

const [scenario, url, shots, key] = process.argv.slice(2);
const csv = process.env.CSV_PATH;
const LIMIT_MS = 200000;
const out = { outside: [], errors: [], wide: [] };
let page;

const text = (id) => page.locator(`#${id}`).textContent();
const says = (id, what) => page.waitForFunction(
  ([id, what]) => document.getElementById(id).textContent.includes(what), [id, what]);
const shown = (id) => page.locator(`#${id}`).waitFor({ state: "visible" });

/** A picture; what is wider than the window would have to be scrolled sideways. */
async function look(name) {
  await page.screenshot({ path: path.join(shots, `${name}.png`), fullPage: true });
  const width = await page.evaluate(() => document.documentElement.scrollWidth);
  if (width > page.viewportSize().width) out.wide.push([name, width]);
}

/** By keyboard alone: Tab until it has the focus. */
async function tabTo(selector) {
  for (let presses = 0; presses < 60; presses++) {
    if (await page.evaluate((one) => document.activeElement?.matches(one), selector)) return;
    await page.keyboard.press("Tab");
  }
  throw new Error(`Tab does not reach ${selector}`);
}

const choose = (name, data) =>
  page.locator("#file").setInputFiles({ name, mimeType: "text/csv", buffer: Buffer.from(data) });

async function train(name) {
  await page.locator("#file").setInputFiles(csv);
  await says("check", "rows");
  out.checked = await text("check");
  await tabTo("#name");
  await page.keyboard.press("Control+A");
  await page.keyboard.type(name);
  await tabTo("#send");
  await page.keyboard.press("Enter");
  await shown("one");
  await says("one-title", name);
}

async function remove() {
  page.once("dialog", (dialog) => dialog.accept());
  await tabTo("#delete");
  await page.keyboard.press("Enter");
  await shown("home");
  await shown("list-empty");
}

/** Runs in the page: how many points the curve had, each time it was drawn. */
function watchCurve() {
  window.drawn = [];
  addEventListener("DOMContentLoaded", () => {
    const plot = document.getElementById("plot");
    if (!plot) return; // it is another page
    const note = () => {
      const points = plot.querySelector("polyline.loss")?.getAttribute("points");
      if (points) window.drawn.push(points.split(" ").length);
    };
    new MutationObserver(note).observe(plot, { childList: true });
  });
}

const scenarios = {
  async life() {
    await page.goto(url);
    await shown("list-empty");
    await look("empty");
    await choose("bad.csv", "one,a\ntwo,b\nthree\nfour,b\nfive,a\n");
    await says("check", "line");
    out.refused = [await text("check"), await page.locator("#send").isDisabled()];
    await look("refused");
    const hostile = "<img src=x onerror=alert(1)>";
    await choose("first.csv", "one,a\ntwo,b\nthree,a\nfour,b\nfive,a\n");
    await says("check", "5 rows");
    await choose("second.csv", "one,a\ntwo,b\nthree,a\nfour,b\nfive,a\nsix,b\n");
    await says("check", "6 rows");
    out.suggested = await page.locator("#name").inputValue();
    await train(hostile);
    await shown("curve");
    await look("curve");
    await page.locator("#log summary").focus();
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.getElementById("log-text").textContent !== "");
    await shown("try");
    await says("job", "Done");
    out.drawn = await page.evaluate(() => window.drawn);
    out.title = await text("one-title");
    out.images = await page.locator("#one-title img").count();
    await tabTo("#sentence");
    await page.keyboard.type("a room for two nights in Cairo");
    await page.keyboard.press("Enter");
    await page.locator("#answers li").first().waitFor();
    out.answers = await page.locator("#answers li").allTextContents();
    out.report = await text("report-summary");
    out.explained = {};
    for (const details of await page.locator("#report-summary details").all()) {
      await details.locator("summary").focus();
      await page.keyboard.press("Enter");
      await details.locator("p").waitFor({ state: "visible" });
      out.explained[await details.locator("summary").textContent()] = await details.locator("p").textContent();
    }
    out.tables = await page.locator("#tables caption").allTextContents();
    await look("trained");
    const [download] = await Promise.all([
      page.waitForEvent("download"), page.locator("[data-download=data]").click()]);
    out.data = fs.readFileSync(await download.path(), "utf8");
    await page.setViewportSize({ width: 1200, height: 800 });
    await look("trained-wide");
    await page.setViewportSize({ width: 360, height: 740 });
    await remove();
  },

  async cancel() {
    await page.goto(url);
    await shown("list-empty");
    await train("to be cancelled");
    await shown("cancel");
    await page.goBack();
    await says("list", "30%");
    out.listed = await text("list");
    await page.goForward();
    await shown("cancel");
    await tabTo("#cancel");
    await page.keyboard.press("Enter");
    await says("job", "Cancelled");
    await shown("retry");
    await says("one-facts", "Cancelled");
    out.facts = await text("one-facts");
    await page.goBack();
    await says("list", "Cancelled");
    out.cancelled = await text("list");
    await page.goForward();
    await shown("retry");
    await look("cancelled");
    out.gone = await page.locator("#cancel").isHidden();
    await page.locator("#retry").click();
    await shown("try");
    await remove();
  },

  /** A text that is refused after one that was answered. */
  async phrase() {
    await page.goto(url);
    await shown("list-empty");
    await train("to be asked");
    await shown("try");
    await page.locator("#sentence").fill("a cheap room");
    await page.keyboard.press("Enter");
    await page.locator("#answers li").first().waitFor();
    await page.locator("#sentence").fill("x".repeat(3000));
    await page.keyboard.press("Enter");
    await says("message", "Phrase too long");
    out.bars = await page.locator("#answers li").count();
    await page.locator("#sentence").fill("a seat");
    await page.keyboard.press("Enter");
    await page.locator("#answers li").first().waitFor();
  },

  /** What the page says of a chosen file, before anything is sent. */
  async preview() {
    await page.goto(url);
    await shown("list-empty");
    out.doubts = {};
    for (const [name, data] of Object.entries(JSON.parse(process.env.FILES))) {
      await choose(name, data);
      await says("check", `${name}: 8 rows`);
      out.doubts[name] = [await text("doubts"), await page.locator("#send").isEnabled()];
      if (out.doubts[name][0]) await look(name);
    }
    await choose("raised.csv", "one,a\ntwo,b\nthree,a\nfour,b\nfive,a\n".repeat(3));
    await says("check", "raised.csv: more than");
    out.raised = await text("check");
  },

  async long() {
    const sent = [];
    page.on("request", (request) => request.method() === "POST" && sent.push(request.url()));
    await page.goto(url);
    await shown("list-empty");
    const data = `one,a\n${"long ".repeat(300)},b\nthree,a\n${"x".repeat(1025)},b\nfive,a\n`;
    await choose("long.csv", data);
    await shown("cut-choice");
    out.refused = [await text("check"), await text("cut-help"), await page.locator("#send").isDisabled()];
    await look("long");
    await choose("header.csv", `text,class\n${data}`);
    await says("check", "header.csv: Phrase");
    out.header = [await text("check"), await text("doubts")];
    await look("long-header");
    await choose("long.csv", data);
    await says("check", "long.csv: Phrase");
    await tabTo("#cut");
    await page.keyboard.press("Space");
    await says("check", "5 rows");
    out.checked = await text("check");
    await tabTo("#send");
    await look("cut");
    await Promise.all([
      page.waitForResponse((one) => one.request().method() === "POST"), page.keyboard.press("Enter")]);
    out.sent = sent.map((one) => one.slice(url.length));
    await says("one-facts", "cut");
    out.facts = await text("one-facts");
    await page.goto(`${url}/docs`);
    await page.goto(url);
    await choose("short.csv", "one,a\ntwo,b\nthree,a\nfour,b\nfive,a\n");
    await says("check", "5 rows");
    out.hidden = await page.locator("#cut-choice").isHidden();
  },

  async missing() {
    out.missing = [];
    for (const named of ["unknown-id", "3f09c2x51c0a7e9d4-nlc-999"]) {
      await page.goto("about:blank");
      await page.goto(`${url}/#${named}`);
      await shown("missing");
      out.missing.push(await text("missing"));
      await look("missing");
      await tabTo("#missing a");
      await page.keyboard.press("Enter");
      await shown("home");
    }
    await train("to be deleted");
    await page.request.delete(`${url}/v1/classifiers/${page.url().split("#")[1]}`);
    await shown("missing");
    out.deleted = await page.locator("#one").isHidden();
  },

  /** The pages that are made of the description and of the guide: size, colours, links, keyboard. */
  async docs() {
    const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    out.colours = {};
    for (const colorScheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme });
      out.colours[colorScheme] = [];
      for (const name of ["", "docs", "guide"]) {
        await page.goto(`${url}/${name}`);
        out.colours[colorScheme].push(await background());
        await look(`${name}-${colorScheme}`);
      }
    }
    await page.goto(`${url}/docs`);
    await tabTo("details summary");
    await page.keyboard.press("Enter");
    await page.locator("details[open] pre").first().waitFor();
    await look("docs-open");
    out.examples = await page.locator("section > pre").allTextContents();
    out.text = await page.locator("main").textContent();
    await page.locator("main a", { hasText: "guide" }).click();
    await page.locator("h2", { hasText: "Training as a service" }).waitFor();
    out.guide = await page.locator("main").textContent();
    await page.locator("header a", { hasText: "API" }).click();
    await page.locator("h2", { hasText: "Keys" }).waitFor();
    await page.locator("header a", { hasText: "Classifiers" }).click();
    await shown("list-empty");
  },

  async keys() {
    await page.goto(url);
    await shown("message");
    out.without = await text("message");
    await tabTo("#key");
    await page.keyboard.type("sk_wrong");
    await page.keyboard.press("Enter");
    await says("message", "Unauthorized");
    out.wrong = await text("message");
    await look("wrong-key");
    await page.locator("#key").fill(key);
    await page.keyboard.press("Enter");
    await shown("list-empty");
    out.right = await page.locator("#message").isHidden();
    await page.locator("#forget-key").click();
    await says("message", "key");
  },
};

async function main() {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM,
    args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
  });
  try {
    page = await browser.newPage({ viewport: { width: 360, height: 740 } });
    page.setDefaultTimeout(LIMIT_MS);
    await page.addInitScript(watchCurve);
    page.on("request", (request) => {
      if (!request.url().startsWith(url) && !/^(blob|data):/.test(request.url())) out.outside.push(request.url());
    });
    page.on("pageerror", (error) => out.errors.push(error.message));
    page.on("console", (line) => line.type() === "error" && out.errors.push(line.text()));
    await scenarios[scenario]();
  } catch (error) {
    out.failed = error.message;
    await page?.screenshot({ path: path.join(shots, "failed.png"), fullPage: true }).catch(() => {});
    out.page = await page?.locator("body").innerText().catch(() => "");
  } finally {
    await browser.close();
  }
  console.log(JSON.stringify(out));
}

main().catch((error) => {
  console.log(JSON.stringify({ failed: error.message }));
});
