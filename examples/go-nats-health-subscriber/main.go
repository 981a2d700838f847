// Follow device health with NATS' own client: each device's present state first, then every change, nothing twice, nothing lost.
//
// No consumer is made, because a subscriber's account has none: a message only shows that there is something to read, and events are read from the
// stream by their place in it (docs/how-to/subscribe-to-health.md). Events go to standard output, all else to standard error.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"net/url"
	"os"
	"sort"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	health    = "topobus.v1.health.>"
	stream    = "TOPOBUS_HEALTH"
	noMessage = 10037 // JetStream's error code for "there is no such message"
	noStream  = 10059 // for "there is no such stream": no service of Topobus has been there yet
	limit     = 5 * time.Second
	pause     = time.Second
)

var errNoStream = errors.New("there is no stream " + stream + " yet")

type message struct {
	Subject string `json:"subject"`
	Seq     uint64 `json:"seq"`
	Data    []byte `json:"data"` // base64 in JSON
}

type answer struct {
	Error *struct {
		Code        int    `json:"err_code"`
		Description string `json:"description"`
	} `json:"error"`
	Created string `json:"created"`
	State   struct {
		LastSeq  uint64            `json:"last_seq"`
		Subjects map[string]uint64 `json:"subjects"`
	} `json:"state"`
	Message *message `json:"message"`
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("go-nats-health-subscriber: ")
	address, err := url.Parse(variable("NATS_URL", "nats://127.0.0.1:4222"))
	if err != nil {
		log.Fatal("NATS_URL is no address: wanted nats://user:PASSWORD@HOST:4222 or tls://HOST:4222") // the error would print the password
	}
	follower := &follower{
		address: address, api: variable("NATS_API", "$JS.topobus.API"), // "$JS.API" at a server of your own that has no accounts
		generations: map[string]uint64{},
	}
	said := ""
	for {
		err := follower.follow(func() {
			if said != "" {
				log.Printf("connected to %s again; going on after place %d of the stream", address.Redacted(), follower.place)
			}
			said = ""
		})
		// The server may be away, or have taken another password: both end a connection, and neither ends a program that was let in before.
		text := explain(address, err)
		if !follower.isPresent && !isAway(err) {
			log.Fatal(text)
		}
		if text != said {
			log.Printf("%s; trying again each second", text)
		}
		said = text
		time.Sleep(pause)
	}
}

func variable(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

// isAway returns whether something is missing only for now. A refused login, a missing file or
// another's certificate do not end by themselves.
func isAway(err error) bool {
	var failed *net.OpError
	return errors.Is(err, errNoStream) || errors.Is(err, nats.ErrNoServers) || errors.Is(err, nats.ErrTimeout) || errors.Is(err, nats.ErrConnectionClosed) || errors.As(err, &failed)
}

func explain(address *url.URL, err error) string {
	if errors.Is(err, nats.ErrAuthorization) {
		return address.Redacted() + " refuses this login: wanted NATS' user `user` with its password (STATE/nats-users/user/password of `topobus up`)"
	}
	if errors.Is(err, nats.ErrNoServers) {
		return address.Redacted() + ": no NATS server answers there"
	}
	return fmt.Sprintf("%s: %v", address.Redacted(), err)
}

// follower remembers its place in the stream over all connections.
type follower struct {
	address     *url.URL
	api         string
	isPresent   bool // the present was shown
	created     string
	place       uint64
	generations map[string]uint64 // the newest that was shown, by subject
}

// follow reads until the connection ends; whenRead hears that this one has read something.
func (f *follower) follow(whenRead func()) error {
	news, ended := make(chan struct{}, 1), make(chan error, 1)
	nc, err := f.connect(ended)
	if err != nil {
		return err
	}
	defer nc.Close()
	hear := func(*nats.Msg) {
		select {
		case news <- struct{}{}:
		default: // a look is due already
		}
	}
	if _, err := nc.Subscribe(health, hear); err != nil {
		return err
	}
	info, err := f.ask(nc, "INFO", map[string]any{"subjects_filter": health})
	if err != nil {
		return err
	}
	whenRead()
	if f.isPresent && (info.Created != f.created || info.State.LastSeq < f.place) {
		log.Print("the stream was made anew, or put back: what it has now is shown from its start, and what came meanwhile may be lost")
		f.isPresent, f.generations = false, map[string]uint64{}
	}
	if !f.isPresent {
		if err := f.showPresent(nc, info); err != nil {
			return err
		}
	}
	for {
		next, err := f.ask(nc, "MSG.GET", map[string]any{"seq": f.place + 1, "next_by_subj": health})
		if err != nil {
			return err
		}
		if next.Message != nil {
			f.show(next.Message)
			continue
		}
		select {
		case <-news:
		case <-time.After(limit): // read all the same: a lost connection reports nothing
		case err := <-ended:
			return err
		}
	}
}

// connect opens one connection, which is replaced and never repaired: nats.go would continue with
// the password that it was given first.
func (f *follower) connect(ended chan error) (*nats.Conn, error) {
	options := []nats.Option{
		nats.Name("go-nats-health-subscriber"), nats.CustomInboxPrefix("_INBOX.user"), nats.Timeout(limit), nats.PingInterval(limit), nats.NoReconnect(),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { log.Print(err) }), // a right that is missing, above all
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err == nil {
				err = nats.ErrConnectionClosed
			}
			ended <- err
		}),
	}
	if file := os.Getenv("NATS_CA"); file != "" {
		options = append(options, nats.RootCAs(file)) // with it, as with tls://, no password is sent to a server that leaves TLS out
	}
	if file := os.Getenv("NATS_PASSWORD_FILE"); file != "" {
		text, err := os.ReadFile(file) // at each connect, for it may be another one by then
		if err != nil {
			return nil, err
		}
		options = append(options, nats.UserInfo("user", strings.TrimSpace(string(text))))
	}
	return nats.Connect(f.address.String(), options...)
}

// showPresent prints the newest event of each device, oldest first, and takes the place from which changes are read.
func (f *follower) showPresent(nc *nats.Conn, info *answer) error {
	var present []*message
	for subject := range info.State.Subjects {
		newest, err := f.ask(nc, "MSG.GET", map[string]any{"last_by_subj": subject})
		if err != nil {
			return err
		}
		// What was stored since this look is a change, and is read as one.
		if newest.Message != nil && newest.Message.Seq <= info.State.LastSeq {
			present = append(present, newest.Message)
		}
	}
	sort.Slice(present, func(a, b int) bool { return present[a].Seq < present[b].Seq })
	for _, message := range present {
		f.show(message)
	}
	f.isPresent, f.created, f.place = true, info.Created, info.State.LastSeq
	return nil
}

// show prints an event. A device's generation grows by one with each event: where it grew by more, the stream has thrown away what was not read in time.
func (f *follower) show(message *message) {
	var event struct {
		Generation uint64 `json:"generation"`
	}
	if err := json.Unmarshal(message.Data, &event); err != nil {
		log.Printf("%s, place %d: no event: %v", message.Subject, message.Seq, err)
		f.place = message.Seq
		return
	}
	if before := f.generations[message.Subject]; before != 0 && event.Generation > before+1 {
		log.Printf("gap: %s: %d events between generations %d and %d were not to be had any more", message.Subject, event.Generation-before-1, before, event.Generation)
	}
	if _, err := fmt.Printf("%s\n", message.Data); err != nil {
		os.Exit(0) // the reader has enough (`| head`)
	}
	f.generations[message.Subject], f.place = event.Generation, message.Seq
}

func (f *follower) ask(nc *nats.Conn, verb string, query any) (*answer, error) {
	data, err := json.Marshal(query)
	if err != nil {
		return nil, err
	}
	reply, err := nc.Request(f.api+".STREAM."+verb+"."+stream, data, limit)
	if err != nil {
		return nil, fmt.Errorf("%s.STREAM.%s.%s: %w", f.api, verb, stream, err)
	}
	var decoded answer
	if err := json.Unmarshal(reply.Data, &decoded); err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	if decoded.Error != nil && decoded.Error.Code == noStream {
		return nil, errNoStream
	}
	if decoded.Error != nil && decoded.Error.Code != noMessage {
		return nil, fmt.Errorf("%s: %s", verb, decoded.Error.Description)
	}
	return &decoded, nil
}
