//! Management datagrams of connection management, and the IP header in their private data.
use freeflow_wire::cm::{IpHeader, Mad, Message};

pub fn run(bytes: &[u8]) {
    let Ok(mad) = Mad::decode(bytes) else {
        look_at_ip_header(bytes);
        return;
    };
    assert_eq!(Mad::decode(&mad.encode()), Ok(mad), "what is read is what is written");
    match &mad.message {
        Message::Req(req) => {
            if let Some(transport) = req.transport() {
                let mut again = *req;
                again.set_transport(transport);
                assert_eq!(again.transport(), Some(transport));
            }
            look_at_ip_header(&req.private_data);
        }
        Message::Rep(rep) => {
            let mut again = *rep;
            again.set_vendor_id(rep.vendor_id());
            assert_eq!(again, *rep);
        }
        Message::SidrReq(request) => look_at_ip_header(&request.private_data),
        Message::SidrRep(reply) => {
            let mut again = *reply;
            again.set_vendor_id(reply.vendor_id());
            assert_eq!(again, *reply);
        }
        _ => {}
    }
}

fn look_at_ip_header(bytes: &[u8]) {
    if let Some(header) = IpHeader::decode(bytes) {
        assert_eq!(IpHeader::decode(&header.encode()), Some(header));
    }
}
