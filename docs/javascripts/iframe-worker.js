// Browsers start no workers from file://. There, the site's search runs in a hidden frame in place of one: a worker's
// messages and importScripts are all that it uses. Elsewhere nothing is done.
(() => {
  if (location.protocol !== "file:") return;

  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.loaded = false;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const page = this.frame.contentWindow;
      page.document.open();
      page.document.write("<!doctype html><html><body></body></html>");
      page.document.close();
      const load = (source) =>
        new Promise((done, failed) => {
          const script = page.document.createElement("script");
          script.src = source;
          script.onload = done;
          script.onerror = () => failed(new Error(`cannot load ${source}`));
          page.document.body.append(script);
        });
      page.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      page.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.page = page;
      load(url).then(() => {
        this.loaded = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }

    set onmessage(listener) {
      this.addEventListener("message", listener);
    }

    postMessage(data) {
      if (!this.loaded) this.waiting.push(data);
      else this.page.dispatchEvent(new this.page.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
})();
