// Browsers start no workers on pages that are opened as files. There, run the script of the search
// in a hidden frame instead, behind the same interface.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.queue = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      const start = () => {
        document.body.append(frame)
        const inside = frame.contentWindow
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        inside.importScripts = (...urls) =>
          urls.reduce((before, next) => before.then(() => this.load(inside, next)), Promise.resolve())
        this.load(inside, url).then(() => {
          this.inside = inside
          this.queue.splice(0).forEach((data) => this.postMessage(data))
        })
      }
      document.body ? start() : addEventListener("DOMContentLoaded", start)
    }

    load(inside, url) {
      return new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        script.src = new URL(url, document.baseURI).href
        script.onload = resolve
        script.onerror = reject
        inside.document.body.append(script)
      })
    }

    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
      else this.queue.push(data)
    }

    terminate() {}
  }
}
