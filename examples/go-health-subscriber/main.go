// Follow device health without any library: each device's present state first, then every change, nothing twice, nothing lost.
//
// It uses NATS' text protocol directly, so that it shows all steps. go-nats-health-subscriber does the same with NATS' own client.
package main

import (
	"bufio"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/url"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"
)

const (
	health    = "topobus.v1.health.>"
	stream    = "TOPOBUS_HEALTH"
	noMessage = 10037 // JetStream's error code for "there is no such message"
	limit     = 5 * time.Second
	maxBytes  = 8 << 20 // no event is near this; a length beyond it is no NATS server's
)

// client is one connection. Its reader returns what was asked for, and reports when something new
// may be in the stream.
type client struct {
	conn    net.Conn
	inbox   string
	asked   int
	replies chan reply
	news    chan struct{}
	ended   chan error
}

type reply struct {
	subject string
	data    []byte
}

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
	State struct {
		LastSeq  uint64            `json:"last_seq"`
		Subjects map[string]uint64 `json:"subjects"`
	} `json:"state"`
	Message *message `json:"message"`
}

func main() {
	log.SetFlags(0)
	follower := &follower{api: variable("NATS_API", "$JS.topobus.API")} // "$JS.API" at a server of your own that has no accounts
	for {
		// The server may be away, or have taken another password: both end a connection, and neither ends this program.
		log.Printf("%v; again in a second", follower.follow())
		time.Sleep(time.Second)
	}
}

func variable(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

// follower remembers its place in the stream over all connections.
type follower struct {
	api       string
	isPresent bool // the present was shown
	place     uint64
}

func (f *follower) follow() error {
	nats, err := connect()
	if err != nil {
		return err
	}
	defer nats.conn.Close()
	if !f.isPresent {
		if err := f.showPresent(nats); err != nil {
			return err
		}
	}
	for {
		next, err := f.ask(nats, "MSG.GET", map[string]any{"seq": f.place + 1, "next_by_subj": health})
		if err != nil {
			return err
		}
		if next.Message != nil {
			if err := f.show(next.Message); err != nil {
				return err
			}
			continue
		}
		select {
		case <-nats.news:
		case <-time.After(limit): // read all the same: a lost connection reports nothing
		case err := <-nats.ended:
			return err
		}
	}
}

// showPresent prints the newest event of each device, oldest first, and takes the place from which changes are read.
func (f *follower) showPresent(nats *client) error {
	info, err := f.ask(nats, "INFO", map[string]any{"subjects_filter": health})
	if err != nil {
		return err
	}
	var present []*message
	for subject := range info.State.Subjects {
		newest, err := f.ask(nats, "MSG.GET", map[string]any{"last_by_subj": subject})
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
		if err := f.show(message); err != nil {
			return err
		}
	}
	f.isPresent, f.place = true, info.State.LastSeq
	return nil
}

func (f *follower) show(message *message) error {
	if _, err := fmt.Printf("%s\n", message.Data); err != nil {
		os.Exit(0) // the reader has enough (`| head`)
	}
	f.place = message.Seq
	return nil
}

func (f *follower) ask(nats *client, verb string, query any) (*answer, error) {
	data, err := nats.request(f.api+".STREAM."+verb+"."+stream, query)
	if err != nil {
		return nil, err
	}
	var decoded answer
	if err := json.Unmarshal(data, &decoded); err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	if decoded.Error != nil && decoded.Error.Code != noMessage {
		return nil, fmt.Errorf("%s: %s", verb, decoded.Error.Description)
	}
	return &decoded, nil
}

// connect opens a connection, with TLS and a login where they are wanted, and subscribes to health and to its own inbox.
func connect() (*client, error) {
	address, err := url.Parse(variable("NATS_URL", "nats://127.0.0.1:4222"))
	if err != nil {
		return nil, err
	}
	if address.Port() == "" {
		address.Host += ":4222"
	}
	conn, err := net.DialTimeout("tcp", address.Host, limit)
	if err != nil {
		return nil, err
	}
	nats, err := greet(conn, address)
	if err != nil {
		conn.Close()
		return nil, err
	}
	return nats, nil
}

func greet(conn net.Conn, address *url.URL) (*client, error) {
	conn.SetDeadline(time.Now().Add(limit))
	reader := bufio.NewReader(conn)
	first, err := reader.ReadString('\n')
	if err != nil {
		return nil, err
	}
	var info struct {
		TLSRequired  bool `json:"tls_required"`
		TLSAvailable bool `json:"tls_available"`
	}
	if err := json.Unmarshal([]byte(strings.TrimPrefix(first, "INFO ")), &info); err != nil {
		return nil, fmt.Errorf("%s is no NATS server: %w", address.Host, err)
	}
	wantsTLS := address.Scheme == "tls" || os.Getenv("NATS_CA") != ""
	if wantsTLS && !info.TLSRequired && !info.TLSAvailable {
		// A password is not sent to a server, or to another in its place, that leaves TLS out.
		return nil, fmt.Errorf("%s offers no TLS", address.Host)
	}
	if wantsTLS || info.TLSRequired {
		settings := &tls.Config{ServerName: address.Hostname()}
		if file := os.Getenv("NATS_CA"); file != "" {
			text, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			settings.RootCAs = x509.NewCertPool()
			if !settings.RootCAs.AppendCertsFromPEM(text) {
				return nil, fmt.Errorf("%s has no certificate", file)
			}
		}
		conn = tls.Client(conn, settings)
		reader = bufio.NewReader(conn)
	}
	login, err := login(address)
	if err != nil {
		return nil, err
	}
	hello, err := json.Marshal(login)
	if err != nil {
		return nil, err
	}
	random := make([]byte, 12)
	if _, err := rand.Read(random); err != nil {
		return nil, err
	}
	nats := &client{
		conn: conn, inbox: "_INBOX.user." + hex.EncodeToString(random),
		replies: make(chan reply, 1), news: make(chan struct{}, 1), ended: make(chan error, 1),
	}
	if _, err := fmt.Fprintf(conn, "CONNECT %s\r\nSUB %s 1\r\nSUB %s.* 2\r\nPING\r\n", hello, health, nats.inbox); err != nil {
		return nil, err
	}
	// The server answers in order, so this PONG shows that the login and both subscriptions are
	// accepted.
	for {
		line, err := reader.ReadString('\n')
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(line, "-ERR") {
			return nil, errors.New(strings.TrimSpace(line))
		}
		if strings.HasPrefix(line, "PONG") {
			break
		}
	}
	conn.SetDeadline(time.Time{})
	go func() { nats.ended <- nats.read(reader) }()
	return nats, nil
}

// login builds the client's identity. A password file is read at each connect, because it may have
// changed by then.
func login(address *url.URL) (map[string]any, error) {
	hello := map[string]any{"verbose": false, "pedantic": false, "lang": "go", "version": "0", "protocol": 1, "name": "go-health-subscriber"}
	if address.User != nil {
		hello["user"] = address.User.Username()
		hello["pass"], _ = address.User.Password()
	}
	if file := os.Getenv("NATS_PASSWORD_FILE"); file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		hello["user"], hello["pass"] = "user", strings.TrimSpace(string(text))
	}
	return hello, nil
}

// read takes what the server sends until the connection ends.
func (c *client) read(reader *bufio.Reader) error {
	for {
		line, err := reader.ReadString('\n')
		if err != nil {
			return err
		}
		words := strings.Fields(line)
		switch {
		case len(words) >= 4 && words[0] == "MSG": // MSG <subject> <our number> [answer to] <bytes>
			size, err := strconv.Atoi(words[len(words)-1])
			if err != nil || size < 0 || size > maxBytes {
				return fmt.Errorf("a message of %s bytes", words[len(words)-1])
			}
			data := make([]byte, size+2)
			if _, err := io.ReadFull(reader, data); err != nil {
				return err
			}
			if words[2] == "1" {
				select {
				case c.news <- struct{}{}:
				default: // a look is due already
				}
				continue
			}
			select {
			case <-c.replies: // no caller waits for that one any more
			default:
			}
			c.replies <- reply{words[1], data[:size]}
		case len(words) > 0 && words[0] == "PING":
			if _, err := c.conn.Write([]byte("PONG\r\n")); err != nil {
				return err
			}
		case len(words) > 0 && words[0] == "-ERR":
			return errors.New(strings.TrimSpace(line))
		}
	}
}

// request publishes a question and waits for its answer; one after the other, so one channel serves all.
func (c *client) request(subject string, query any) ([]byte, error) {
	data, err := json.Marshal(query)
	if err != nil {
		return nil, err
	}
	c.asked++
	answerTo := fmt.Sprintf("%s.%d", c.inbox, c.asked)
	if _, err := fmt.Fprintf(c.conn, "PUB %s %s %d\r\n%s\r\n", subject, answerTo, len(data), data); err != nil {
		return nil, err
	}
	timeout := time.After(limit)
	for {
		select {
		case got := <-c.replies:
			if got.subject == answerTo {
				return got.data, nil
			}
		case err := <-c.ended:
			return nil, err
		case <-timeout:
			return nil, fmt.Errorf("%s: no answer within %s", subject, limit)
		}
	}
}
