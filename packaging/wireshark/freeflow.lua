-- Wireshark: FreeFlow's frames, the packets that its routers exchange beside those of RoCEv2 (UDP port 4791).
-- The format: docs/architecture/wire.md, "Frames" and "Sealed packets". Everything else on that port stays the matter of Wireshark's own dissector.
--
--   tshark -X lua_script:freeflow.lua -r capture.pcapng -O freeflow
local frame = Proto("freeflow", "FreeFlow frame")

local operations = {
    [0] = "SEND First", "SEND Middle", "SEND Last", "SEND Last with Immediate", "SEND Only",
    "SEND Only with Immediate", "RDMA WRITE First", "RDMA WRITE Middle", "RDMA WRITE Last",
    "RDMA WRITE Last with Immediate", "RDMA WRITE Only", "RDMA WRITE Only with Immediate", "RDMA READ Request",
    "RDMA READ response First", "RDMA READ response Middle", "RDMA READ response Last",
    "RDMA READ response Only", "Report", [0x16] = "SEND Last with Invalidate", [0x17] = "SEND Only with Invalidate",
    [0x1f] = "Records",
}
local immediate = { [0x03] = true, [0x05] = true, [0x09] = true, [0x0b] = true }
local invalidate = { [0x16] = true, [0x17] = true }

local f = frame.fields
f.opcode = ProtoField.uint8("freeflow.opcode", "Opcode", base.HEX, operations, 0x1f)
f.solicited = ProtoField.bool("freeflow.solicited", "Solicited event", 8, nil, 0x80)
f.pkey = ProtoField.uint16("freeflow.pkey", "P_Key", base.HEX)
f.fecn = ProtoField.bool("freeflow.fecn", "FECN", 8, nil, 0x80)
f.becn = ProtoField.bool("freeflow.becn", "BECN", 8, nil, 0x40)
f.destqp = ProtoField.uint24("freeflow.destqp", "Destination QP", base.HEX)
f.ack_request = ProtoField.bool("freeflow.ack_request", "Acknowledge request", 8, nil, 0x80)
f.psn = ProtoField.uint24("freeflow.psn", "PSN")
f.address = ProtoField.uint64("freeflow.address", "Address or offset", base.HEX)
f.rkey = ProtoField.uint32("freeflow.rkey", "R_Key", base.HEX)
f.length = ProtoField.uint32("freeflow.length", "Length of the message")
f.kept = ProtoField.bytes("freeflow.kept", "Packets kept behind the missing one")
f.immediate = ProtoField.bytes("freeflow.immediate", "Immediate data")
f.invalidate = ProtoField.uint32("freeflow.invalidate", "R_Key to invalidate", base.HEX)
f.syndrome = ProtoField.uint8("freeflow.syndrome", "Syndrome", base.HEX)
f.msn = ProtoField.uint24("freeflow.msn", "MSN")
f.response = ProtoField.uint32("freeflow.response", "Payload of a response packet")
f.message_psn = ProtoField.uint24("freeflow.message_psn", "First PSN of the message")
f.crc = ProtoField.uint32("freeflow.crc", "CRC of the headers", base.HEX)
f.crc_good = ProtoField.bool("freeflow.crc_good", "CRC is good")
f.payload = ProtoField.bytes("freeflow.payload", "Payload")
f.seal_key = ProtoField.uint24("freeflow.seal.key", "Key", base.HEX)
f.seal_sender = ProtoField.uint8("freeflow.seal.sender", "Engine of the sender", base.DEC, nil, 0xe0)
f.seal_shard = ProtoField.uint8("freeflow.seal.shard", "Engine of the receiver")
f.seal_counter = ProtoField.bytes("freeflow.seal.counter", "Packets sealed with the key before")
f.seal_text = ProtoField.bytes("freeflow.seal.text", "Encrypted packet")
f.seal_tag = ProtoField.bytes("freeflow.seal.tag", "Tag")
f.count = ProtoField.uint8("freeflow.records", "Messages")
f.heads = ProtoField.uint16("freeflow.heads", "Bytes of their heads")
f.record = ProtoField.uint8("freeflow.record", "Message", base.HEX, operations, 0x1f)
f.record_length = ProtoField.uint16("freeflow.record_length", "Payload of the message")
local damaged = ProtoExpert.new("freeflow.crc_bad", "The CRC of the headers is wrong", expert.group.CHECKSUM,
    expert.severity.ERROR)
frame.experts = { damaged }

-- CRC-32 as of Ethernet, bit by bit: headers are short. Numbers of Lua 5.2 are doubles, so this stays within 32 bits.
local function xor(a, b)
    local result, place = 0, 1
    while a > 0 or b > 0 do
        if a % 2 ~= b % 2 then result = result + place end
        a, b, place = math.floor(a / 2), math.floor(b / 2), place * 2
    end
    return result
end

local function crc32(bytes)
    local crc = 0xffffffff
    for at = 0, bytes:len() - 1 do
        crc = xor(crc, bytes:get_index(at))
        for _ = 1, 8 do
            local odd = crc % 2 == 1
            crc = math.floor(crc / 2)
            if odd then crc = xor(crc, 0xedb88320) end
        end
    end
    return xor(crc, 0xffffffff)
end

local HEADER_BYTES = 40
local SEAL_HEADER_BYTES, SEAL_TAG_BYTES = 12, 16
local SEAL_BYTES = SEAL_HEADER_BYTES + SEAL_TAG_BYTES
local RECORDS = 0x1f
local HEADS_AT = 16
local ports = DissectorTable.get("udp.port")
local standard = ports:get_dissector(4791)

local function add_crc(branch, buffer, at)
    local crc = branch:add_le(f.crc, buffer(at, 4))
    local good = crc32(buffer(0, at):bytes()) == buffer(at, 4):le_uint()
    branch:add(f.crc_good, good):set_generated()
    if not good then crc:add_proto_expert_info(damaged) end
end

-- Several messages: their heads, then the CRC, then all payload.
local function add_records(buffer, packet, branch)
    local count, heads = buffer(12, 1):uint(), buffer(14, 2):uint()
    branch:add(f.count, buffer(12, 1))
    branch:add(f.heads, buffer(14, 2))
    packet.cols.info:append(string.format(" %d messages", count))
    local at, crc_at = HEADS_AT, HEADS_AT + heads
    if crc_at + 4 > buffer:len() then return end
    local payload = crc_at + 4
    add_crc(branch, buffer, crc_at)
    while at + 4 <= crc_at do
        local opcode, length = buffer(at, 1):uint() % 32, buffer(at + 2, 2):uint()
        local writes = opcode == 0x0a or opcode == 0x0b
        local argues = immediate[opcode] or invalidate[opcode]
        local bytes = 4 + (writes and 12 or 0) + (argues and 4 or 0)
        if at + bytes > crc_at then return end
        local record = branch:add(f.record, buffer(at, 1))
        record:add(f.solicited, buffer(at, 1))
        record:add(f.record_length, buffer(at + 2, 2))
        if writes then
            record:add(f.rkey, buffer(at + 4, 4))
            record:add(f.address, buffer(at + 8, 8))
        end
        if argues then
            record:add(immediate[opcode] and f.immediate or f.invalidate, buffer(at + bytes - 4, 4))
        end
        if length > 0 and payload + length <= buffer:len() then
            record:add(f.payload, buffer(payload, length))
        end
        at, payload = at + bytes, payload + length
    end
end

-- A packet in a seal: nothing but its header can be read.
local function add_seal(buffer, packet, tree)
    packet.cols.protocol = "FreeFlow"
    packet.cols.info = string.format("sealed, key=0x%06x, to engine %d", buffer(1, 3):uint(), buffer(4, 1):uint())
    local branch = tree:add(frame, buffer(0, buffer:len()))
    branch:add(f.seal_key, buffer(1, 3))
    branch:add(f.seal_sender, buffer(1, 1))
    branch:add(f.seal_shard, buffer(4, 1))
    branch:add(f.seal_counter, buffer(5, 7))
    if buffer:len() > SEAL_BYTES then
        branch:add(f.seal_text, buffer(SEAL_HEADER_BYTES, buffer:len() - SEAL_BYTES))
    end
    branch:add(f.seal_tag, buffer(buffer:len() - SEAL_TAG_BYTES, SEAL_TAG_BYTES))
    return buffer:len()
end

function frame.dissector(buffer, packet, tree)
    if buffer:len() >= SEAL_BYTES and buffer(0, 1):uint() == 0xe0 then return add_seal(buffer, packet, tree) end
    local is_frame = buffer:len() >= HEADS_AT + 4 and math.floor(buffer(0, 1):uint() / 32) == 6
    local has_records = is_frame and buffer(0, 1):uint() % 32 == RECORDS
    if not is_frame or not has_records and buffer:len() < HEADER_BYTES then
        return standard:call(buffer, packet, tree)
    end
    local opcode = buffer(0, 1):uint() % 32
    packet.cols.protocol = "FreeFlow"
    packet.cols.info = string.format("%s QP=0x%06x PSN=%d", operations[opcode] or "unknown operation",
        buffer(5, 3):uint(), buffer(9, 3):uint())
    local branch = tree:add(frame, buffer(0, buffer:len()))
    branch:add(f.opcode, buffer(0, 1))
    branch:add(f.solicited, buffer(1, 1))
    branch:add(f.pkey, buffer(2, 2))
    branch:add(f.fecn, buffer(4, 1))
    branch:add(f.becn, buffer(4, 1))
    branch:add(f.destqp, buffer(5, 3))
    branch:add(f.ack_request, buffer(8, 1))
    branch:add(f.psn, buffer(9, 3))
    if has_records then
        add_records(buffer, packet, branch)
        return buffer:len()
    end
    if opcode == 0x11 then
        branch:add(f.kept, buffer(12, 16))
    else
        branch:add(f.address, buffer(12, 8))
        branch:add(f.rkey, buffer(20, 4))
        branch:add(f.length, buffer(24, 4))
    end
    local argument = buffer(28, 4)
    if immediate[opcode] then
        branch:add(f.immediate, argument)
    elseif invalidate[opcode] then
        branch:add(f.invalidate, argument)
    elseif opcode == 0x0c then
        branch:add(f.response, argument)
    elseif opcode >= 0x0d and opcode <= 0x11 then
        branch:add(f.syndrome, buffer(28, 1))
        branch:add(f.msn, buffer(29, 3))
    end
    branch:add(f.message_psn, buffer(33, 3))
    add_crc(branch, buffer, HEADER_BYTES - 4)
    if buffer:len() > HEADER_BYTES then
        branch:add(f.payload, buffer(HEADER_BYTES))
    end
    return buffer:len()
end

ports:add(4791, frame)
